# Sourced by the scripts beside it: finds Python >= 3.12 and keeps `.venv` in the repository root.
#
#   prepare_env EXTRAS     EXTRAS is "" or a comma-separated list of extras of pyproject.toml. Afterwards
#                          $PYTHON runs jinfer. A .venv that already holds all that is left alone.
#
# What it prints goes to stderr, so a script's own stdout stays clean.

ROOT=$(CDPATH= cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
PYTHON=$VENV/bin/python
STAMP=$VENV/.jinfer-stamp

say() { printf '%s\n' "$*" >&2; }

# A name on PATH may be a shim that answers with an error, so each candidate is run.
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }
makes_venvs() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# Prints an interpreter >= 3.12 that can make virtual environments, or fails.
find_python() {
  local candidate root=${PYENV_ROOT:-$HOME/.pyenv}
  for candidate in python3.13 python3.12 python3 python \
      "$root"/versions/3.13*/bin/python3 "$root"/versions/3.12*/bin/python3 "$root"/versions/*/bin/python3; do
    if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate" && makes_venvs "$candidate"; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

# Prints a uv that runs: the one on PATH, else one installed into the user's cache by whatever pip there is.
find_uv() {
  local tools=${XDG_CACHE_HOME:-$HOME/.cache}/jinfer/uv python
  if command -v uv >/dev/null 2>&1 && uv --version >/dev/null 2>&1; then command -v uv; return 0; fi
  if "$tools/bin/uv" --version >/dev/null 2>&1; then printf '%s\n' "$tools/bin/uv"; return 0; fi
  for python in python3 python /usr/bin/python3; do
    if "$python" -m pip --version >/dev/null 2>&1 \
        && "$python" -m pip install --quiet --disable-pip-version-check --target "$tools" uv >&2 \
        && "$tools/bin/uv" --version >/dev/null 2>&1; then
      printf '%s\n' "$tools/bin/uv"
      return 0
    fi
  done
  return 1
}

make_venv() {
  local python uv
  if python=$(find_python); then
    say "jinfer: making .venv with $python"
    "$python" -m venv --clear "$VENV"
  elif uv=$(find_uv); then
    say "jinfer: no Python >= 3.12 that can make a .venv here; uv finds or fetches one"
    "$uv" venv --quiet --clear --seed --python '>=3.12,<3.15' "$VENV"
  else
    say "jinfer: needs Python 3.12 or newer, or pip to install uv, which fetches one. Neither was found."
    return 1
  fi
}

# uv on PATH installs faster; where it fails (a mirror or certificate only pip is set up for), pip does it.
install_project() {
  local target=$ROOT${1:+[$1]}
  if command -v uv >/dev/null 2>&1 && uv pip install --quiet --python "$PYTHON" -e "$target"; then return 0; fi
  "$PYTHON" -m pip install --quiet --disable-pip-version-check -e "$target" >&2
}

# What the environment depends on, the place of the repository (it is installed editable) included.
fingerprint() {
  { cat "$ROOT/pyproject.toml"; printf '%s\n' "$ROOT" "$("$PYTHON" -V 2>&1)"; } | cksum | tr ' ' -
}

has_package() { "$PYTHON" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>/dev/null; }

# offer_extra EXTRA PACKAGE..  Installs an extra unless its packages are there; fails if that takes over five minutes
# or no index answers, and leaves it at that: the extra is one that jinfer does without.
offer_extra() {
  local extra=$1 package missing=
  shift
  for package in "$@"; do has_package "$package" || missing=1; done
  [ -n "$missing" ] || return 0
  say "jinfer: installing the $extra extra into .venv"
  timeout 300 "$PYTHON" -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 10 \
    -e "$ROOT[$extra]" >&2 || return 1
  for package in "$@"; do has_package "$package" || return 1; done
}

prepare_env() {
  local extras=$1
  if ! { new_enough "$PYTHON" && "$PYTHON" -m pip --version >/dev/null 2>&1; }; then make_venv || return 1; fi
  # A stamp of more extras serves fewer: scripts/demo takes what scripts/test has made.
  if [ -f "$STAMP" ] && [ "$(head -n 1 "$STAMP")" = "$(fingerprint)" ] \
      && { [ -z "$extras" ] || [ "$(sed -n 2p "$STAMP")" = "$extras" ]; }; then
    return 0
  fi
  say "jinfer: installing into .venv (a few minutes the first time)"
  rm -f "$STAMP"
  install_project "$extras" || { say "jinfer: the installation failed; see above"; return 1; }
  printf '%s\n%s\n' "$(fingerprint)" "$extras" > "$STAMP"
}
