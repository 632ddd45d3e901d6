"""tokenyard tune: what it tries, what it keeps, and that later look-ups take it."""

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from tokenyard.cli import tune
from tokenyard.cli.main import app
from tokenyard.kernels import tiles
from tokenyard.kernels.tiles import GemmTile

CPU = torch.device("cpu")
needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TOKENYARD_CACHE", str(tmp_path / "cache"))
    tiles.tuned_tiles.cache_clear()
    tiles.gemm_tile.cache_clear()
    yield tmp_path / "cache"
    tiles.tuned_tiles.cache_clear()
    tiles.gemm_tile.cache_clear()


FASTER = GemmTile(16, 16, 16, 4, 2)


@needs_interpreter
def test_the_faster_tile_is_kept_and_found_again(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(bucket: str, own: GemmTile) -> list[GemmTile]:
        return [own, GemmTile(int(bucket) if bucket.isdigit() else 16, 16, 16, 4, 2)]

    def clock(run: Callable[[], Tensor]) -> float:
        if not tiles._trial:
            return 2.0  # as it is at present
        (tile,) = tiles._trial.values()
        return 1.0 if tile == FASTER else 2.0

    monkeypatch.setattr(tune, "candidates", two)
    monkeypatch.setattr(tune, "milliseconds", clock)
    monkeypatch.setattr(tune, "ROWS", {"16": 3, "many": 4})
    path = tune.tune(24, 8, 2, "fp32", CPU, Console(file=io.StringIO()))
    assert path == cache_folder / "tiles.json"
    kept = json.loads(path.read_text())
    assert {key.split()[2] for key in kept} == {"16", "many", "weight"}
    tile, source = tiles.gemm_tile("sm_90", torch.float32, "16", 24, 16)
    assert tile == FASTER and "tuned" in source
    tile, source = tiles.gemm_tile("sm_90", torch.float32, "16", 24, 99)
    assert tile != FASTER and "table" in source


def test_a_tile_that_is_hardly_faster_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    own = GemmTile(16, 64, 128, 4, 5)
    problem = tune.Problem("1 x 1", "16", "key", own, lambda: torch.ones(1))
    monkeypatch.setattr(
        tune, "milliseconds", lambda run: 1.0 if own in tiles._trial.values() else 0.99
    )
    monkeypatch.setattr(tune, "problems", lambda *sizes: [problem])
    path = tune.tune(1, 1, 1, "bf16", CPU, Console(file=io.StringIO()))
    assert json.loads(path.read_text()) == {}


def test_a_wrong_result_never_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    own = GemmTile(16, 64, 128, 4, 5)
    wrong = GemmTile(16, 16, 16, 4, 2)

    def run() -> Tensor:
        return torch.full((1,), float(wrong in tiles._trial.values()))

    monkeypatch.setattr(tune, "milliseconds", lambda run: 0.1 if float(run()) else 1.0)
    monkeypatch.setattr(tune, "candidates", lambda *_: [own, wrong])
    problem = tune.Problem("1 x 1", "16", "key", own, run)
    assert tune.fastest(problem, lambda: None)[0] == own


def test_candidates_fit_some_device() -> None:
    for bucket in ("16", "32", "64", "many", "weight"):
        own, _ = tiles.gemm_tile("sm_90", torch.bfloat16, bucket, 8, 8)
        tried = list(tune.candidates(bucket, own))
        assert tried[0] == own and len(set(tried)) == len(tried) > 5
        assert all(tile.rows == int(bucket) for tile in tried if bucket.isdigit())


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"k": {"rows": 3}}', '{"k": 1}', '{"k": {"rows": "x"}}']
)
def test_a_broken_table_says_which_file(cache_folder: Path, text: str) -> None:
    cache_folder.mkdir()
    (cache_folder / "tiles.json").write_text(text)
    with pytest.raises(ValueError, match=r"tiles\.json is not a table of tiles; remove it"):
        tiles.tuned_tiles()


def test_errors_are_one_line() -> None:
    sizes = ["--hidden-size", "8", "--intermediate-size", "8", "--experts", "2"]
    for more, message in (
        (["--device", "cpu"], "--device must be a GPU"),
        (["--dtype", "int8"], "--dtype must be one of bf16, fp16, fp32"),
    ):
        result = CliRunner().invoke(app, ["tune", *sizes, *more])
        assert result.exit_code == 1 and message in result.output
        assert len(result.output.strip().splitlines()) == 1
