#!/usr/bin/env bash
# Run the tests of the transformers integration against each version given ("newest": what pip takes), each in
# an environment of its own, with PEFT, that borrows the other packages of .venv: matrix.sh PYTHON VERSION ...
set -euo pipefail
python=$1
shift
base=$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
failed=()
for version in "$@"; do
    folder=.venv-hf/$version
    if [ ! -e "$folder/.installed" ]; then
        $python -m venv --clear "$folder"
        printf '%s\n' "$base" "$PWD" > "$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
        wanted=transformers
        [ "$version" = newest ] || wanted+="==$version"
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "$wanted" peft
        touch "$folder/.installed"
    fi
    "$folder/bin/python" -c 'import transformers; print("transformers", transformers.__version__)'
    "$folder/bin/python" -m pytest -n "${JOBS:-2}" -q -p no:cacheprovider tests/integrations || failed+=("$version")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed with transformers ${failed[*]}" >&2
    exit 1
fi
