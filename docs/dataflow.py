"""Draw docs/dataflow.svg: the steps of `expert_mlp`, what each reads and writes, and what is kept.

python docs/dataflow.py
"""

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, ROW, BOX, LEFT = 860, 62, 42, 20
FORWARD = [
    ("route, permute", "x [T,H], row maps", "rows [R,H]"),
    ("up GEMM + activation", "rows, W1, b1", "z [R,2I], a [R,I]"),
    ("down GEMM", "a, W2, b2", "y [R,H]"),
    ("weighted sum", "y, routing weights", "out [T,H]"),
]
BACKWARD = [
    ("permute, down GEMM transposed", "gradient g [T,H], W2", "g rows [R,H], d_a [R,I]"),
    ("activation's gradient", "d_a, z, routing weights", "d_z [R,2I], w a [R,I], <d_a, a> [R]"),
    ("weight gradients", "g rows, w a, d_z, x permuted again", "d_W1, d_W2, d_b1, d_b2"),
    ("up GEMM transposed, sum", "d_z, W1", "d_x [T,H], d_weights [T,K]"),
]
KEPT = {"z [R,2I], a [R,I]": "z is kept", "rows [R,H]": "x is kept"}


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def step(number: int, y: float, name: str, reads: str, writes: str) -> list[str]:
    kept = KEPT.get(writes)
    parts = [
        f'<rect x="{LEFT}" y="{y:g}" width="250" height="{BOX}" rx="6" class="box"/>',
        text(LEFT + 12, y + 26, f"{number}  {name}"),
        text(LEFT + 270, y + 18, f"reads {reads}", "data"),
        text(LEFT + 270, y + 35, f"writes {writes}", "data"),
    ]
    if kept:
        parts += [
            f'<rect x="{WIDTH - 150}" y="{y + 6:g}" width="130" height="30" rx="15" class="kept"/>',
            text(WIDTH - 128, y + 26, kept),
        ]
    return parts


def drawing() -> str:
    parts: list[str] = []
    y, number = 16.0, 1
    for title, steps in (("Forward", FORWARD), ("Backward", BACKWARD)):
        parts.append(text(LEFT, y + 14, title, "title"))
        y += 26
        for index, (name, reads, writes) in enumerate(steps):
            parts += step(number, y, name, reads, writes)
            if index + 1 < len(steps):
                x = LEFT + 30
                parts.append(f'<path d="M{x} {y + BOX:g} V{y + ROW - 3:g}" class="arrow"/>')
            y, number = y + ROW, number + 1
        y += 8
    style = (
        "text{font:14px sans-serif;fill:#1f2933}.data{font-size:13px;fill:#52606d}"
        ".title{font-weight:bold;font-size:15px}.box{fill:#e6f0fa;stroke:#4a7ba6}"
        ".kept{fill:#fdf3d8;stroke:#b88a1b}.arrow{stroke:#4a7ba6;stroke-width:2;fill:none}"
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y:g}" '
        f'viewBox="0 0 {WIDTH} {y:g}">\n<style>{style}</style>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    Path(__file__).with_name("dataflow.svg").write_text(drawing(), encoding="utf-8")
