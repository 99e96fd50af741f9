#!/bin/sh
# Builds a test program whose CUDA kernels run on the CPU, emulated: scripts/cuda_emu.sh tests/ops/opscheck OUT
set -e
test=$1 out=$2 build=${BUILD:-build/x86_64-gcc}
work=$(dirname "$out")/emu_src
mkdir -p "$work"
for f in src/ops/cuda/*.cu src/ops/cuda/*.cuh; do
    to=$work/ops/cuda/$(basename "$f")
    mkdir -p "$(dirname "$to")"
    sed -E -e 's/extern __shared__ (__align__\([0-9]+\) )?(float|char|double|int|int32_t|uint32_t) ([a-z_]+)\[\];/\2 *\3 = (\2 *)emu_dyn;/' \
        -e 's/probe_kernel<<<.*>>>\(p\)/probe_kernel(p)/' "$f" > "$to.new"
    cmp -s "$to.new" "$to" 2>/dev/null && rm "$to.new" || mv "$to.new" "$to"
done
flags="-x c++ -std=c++17 -O2 -g -ffp-contract=off -fno-strict-aliasing -fno-exceptions -Itests/emu -I$work -Isrc -DNIBBLE_CUDA -march=native -w $EMU_FLAGS"
objs=
for f in "$work"/ops/cuda/*.cu tests/emu/emu.cc; do
    o=$work/$(basename "$f").o
    if [ -n "$(find "$f" "$work"/ops/cuda/*.cuh src/ops/cuda/gpu.h tests/emu -newer "$o" 2>/dev/null)" ] || [ ! -e "$o" ]; then
        ${CXX:-g++} $flags -c -o "$o" "$f"
    fi
    objs="$objs $o"
done
cp "$build/libnibble.a" "$work/lib.a"
ar t "$work/lib.a" | grep '\.cu\.o$' | xargs ar d "$work/lib.a"
gcc $EMU_LINK -o "$out" "$build/$test.o" "$build"/tests/lib/*.o $objs "$work/lib.a" -lcmocka -lyajl -lpcre2-8 -lutf8proc -levent_core -levent_extra -lm -pthread -Wl,--push-state,--as-needed -L/usr/lib/x86_64-linux-gnu/openmpi/lib -lmpi -Wl,--pop-state -ldl -lrt -lstdc++
