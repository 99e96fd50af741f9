#!/usr/bin/env bash
# usage: setup.sh [--minimal | --no-cross] [--client] [--browser]
# Installs what nibble needs on Debian 12 (bookworm) or a derivative; does nothing, quickly, when it is all there.
#   --minimal    only what building and running need
#   --client     with --minimal: curl and the Python packages too, the API's official clients among them
#   --no-cross   no aarch64 cross compiler, libraries and emulator (the aarch64 tests cannot run then)
#   --browser    Chromium too, for the tests of the built-in page
# Uses root, or sudo; without either it prints the command that someone with rights has to run, and exits 4.
set -euo pipefail
cd "$(dirname "$0")/.."

minimal='' cross=1 client='' browser=''
for a in "$@"; do
  case $a in
  --minimal) minimal=1 cross='' ;;
  --no-cross) cross='' ;;
  --client) client=1 ;;
  --browser) browser=1 ;;
  -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *) echo "setup: unknown option '$a' (--minimal, --no-cross, --client, --browser)" >&2; exit 2 ;;
  esac
done
say() { echo "setup: $*" >&2; }

# docs/DEPENDENCIES.md gives the reason of each.
want="gcc libc6-dev make pkg-config git libyajl-dev libpcre2-dev libutf8proc-dev libedit-dev libevent-dev"
[ -n "$minimal" ] || want+=" libopenmpi-dev openmpi-bin libcmocka-dev clang libclang-rt-14-dev clang-format clang-tidy cppcheck mandoc util-linux python3 python3-venv"
[ -z "$client" ] || want+=" curl python3 python3-venv"
[ -z "$browser" ] || want+=" chromium fonts-dejavu-core"
[ "$(uname -m)" = x86_64 ] || cross=''
if [ -n "$cross" ]; then
  want+=" gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
  # libevent-dev of both architectures cannot be installed together: the Makefile links the run-time libraries.
  for p in libyajl-dev libpcre2-dev libutf8proc-dev libedit-dev libcmocka-dev libevent-core-2.1-7 libevent-extra-2.1-7; do want+=" $p:arm64"; done
fi

if ! command -v dpkg-query > /dev/null || ! command -v apt-get > /dev/null; then
  if pkg-config --exists yajl libpcre2-8 libutf8proc libedit libevent_core libevent_extra 2> /dev/null && command -v make gcc > /dev/null; then
    say "no Debian package tools here; compiler and libraries are present, so going on"
    want=
  else
    say "this is not a Debian system; please install the equivalents of: $want"
    exit 4
  fi
fi

missing=
if [ -n "$want" ]; then
  native=$(dpkg --print-architecture)
  have=$(dpkg-query -W -f '${Package}:${Architecture} ${db:Status-Status}\n' | sed -n 's/ installed$//p')
  for p in $want; do
    case $p in *:*) n=$p ;; *) n=$p:$native ;; esac
    grep -qxF -e "$n" -e "${p%%:*}:all" <<< "$have" || missing+=" $p"
  done
fi
if [ -n "$missing" ]; then
  add=
  if [[ $missing == *:arm64* ]] && ! dpkg --print-foreign-architectures | grep -qx arm64; then add="dpkg --add-architecture arm64"; fi
  install="apt-get install -y --no-install-recommends$missing"
  if [ "$(id -u)" -eq 0 ]; then as=()
  elif command -v sudo > /dev/null && { [ -t 0 ] || sudo -n true 2> /dev/null; }; then as=(sudo)
  else
    say "missing packages, and neither root nor sudo to install them. Please have this run:"
    # shellcheck disable=SC2016
    echo "  su -c '${add:+$add && }apt-get update && $install'" >&2
    exit 4
  fi
  say "installing$missing"
  log=$(mktemp); trap 'rm -f "$log"' EXIT
  root() { "${as[@]}" env DEBIAN_FRONTEND=noninteractive LC_ALL=C "$@" > "$log" 2>&1; }
  # shellcheck disable=SC2086
  [ -z "$add" ] || root $add || { cat "$log" >&2; exit 4; }
  # Lists may be absent or old, so they are fetched once; a broken foreign source must not stop what the others can give.
  root apt-get -o Acquire::Retries=3 update || { say "apt-get update had problems:"; tail -n 5 "$log" >&2; }
  # shellcheck disable=SC2086
  root apt-get -o Acquire::Retries=3 -o Dpkg::Use-Pty=0 install -y --no-install-recommends $missing || {
    tail -n 20 "$log" >&2
    say "E: packages could not be installed; the command was: $install"
    exit 4
  }
fi
[ -z "$minimal" ] || [ -n "$client" ] || exit 0

# The Python test tier. Debian's own python3 is preferred, so that another one on PATH does not decide.
python=/usr/bin/python3; [ -x $python ] || python=python3
stamp=$($python -c 'import sys; print(sys.version)'; cat tools/requirements.txt)
if [ "$(cat .venv/installed 2> /dev/null)" != "$stamp" ]; then
  say "installing the Python test packages into .venv"
  rm -rf .venv
  log2=$(mktemp)
  { $python -m venv .venv && .venv/bin/python -m pip install -q --disable-pip-version-check --retries 5 --no-deps --only-binary :all: -r tools/requirements.txt; } > "$log2" 2>&1 ||
    { tail -n 20 "$log2" >&2; rm -rf .venv "$log2"; say "E: the Python packages of tools/requirements.txt could not be installed"; exit 4; }
  rm -f "$log2"
  printf '%s\n' "$stamp" > .venv/installed
fi
