/* emu.cc - the fibers of cuda_runtime.h. x86-64 only. */
#include <stdio.h>
#include <vector>

#include "cuda_runtime.h"

dim3 emu_thread, blockIdx, blockDim, gridDim;
char *emu_dyn;
emu_steps *emu_recording;

enum { STACK = 96 << 10, MOST = 1024 };
enum state { READY, AT_BARRIER, AT_WARP, DONE };
struct fiber {
    void *sp;
    state st;
    unsigned seq[2]; /* posts: of the whole warp, of a pair */
    uint32_t mask;
    int channel;
    char post[2][2][EMU_POST];
};
static fiber fibers[MOST];
static char *stacks;
static void *home;
static int current, count, arrived, live;
static unsigned generation;
static int or_of[2];
static const std::function<void()> *body;
static char gathered[MOST][32 * EMU_POST];

extern "C" void emu_switch(void **from, void *to);
asm(".text\n.globl emu_switch\nemu_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

static void give_way() {
    emu_switch(&fibers[current].sp, home);
}

static void release() {
    if (live == 0 || arrived < live) return;
    arrived = 0;
    generation++;
    or_of[generation & 1] = 0; /* of the barrier to come */
    for (int i = 0; i < count; i++)
        if (fibers[i].st == AT_BARRIER) fibers[i].st = READY;
}

static void start() {
    (*body)();
    fibers[current].st = DONE;
    live--;
    release();
    give_way();
    abort();
}

int __syncthreads_or(int p) {
    const unsigned mine = generation;
    or_of[mine & 1] |= p != 0;
    fibers[current].st = AT_BARRIER;
    arrived++;
    release();
    if (generation == mine) give_way();
    fibers[current].st = READY;
    return or_of[mine & 1];
}
void __syncthreads() { __syncthreads_or(0); }

static bool all_posted(int t) {
    const fiber &f = fibers[t];
    for (int i = 0; i < 32; i++) {
        const int o = t / 32 * 32 + i;
        if (!(f.mask >> i & 1) || o >= count || fibers[o].st == DONE) continue;
        if ((int)(fibers[o].seq[f.channel] - f.seq[f.channel]) < 0) return false;
    }
    return true;
}

const char *emu_post(uint32_t mask, const void *v, size_t bytes) {
    fiber &f = fibers[current];
    const int ch = mask != 0xffffffffu;
    f.mask = mask;
    f.channel = ch;
    f.seq[ch]++;
    const unsigned slot = f.seq[ch] & 1;
    memcpy(f.post[ch][slot], v, bytes);
    f.st = AT_WARP;
    while (!all_posted(current)) give_way();
    f.st = READY;
    for (int i = 0; i < 32; i++) {
        const int o = current / 32 * 32 + i;
        if (o < count) memcpy(gathered[current] + i * EMU_POST, fibers[o].post[ch][slot], EMU_POST);
    }
    return gathered[current];
}

static void run_block() {
    live = count;
    arrived = 0;
    or_of[0] = or_of[1] = 0;
    for (int i = 0; i < count; i++) {
        fiber &f = fibers[i];
        f.st = READY;
        f.seq[0] = f.seq[1] = 0;
        uint64_t *top = (uint64_t *)(stacks + (size_t)(i + 1) * STACK - 64);
        *--top = 0;
        *--top = (uint64_t)start;
        top -= 6;
        f.sp = top;
    }
    static const char *backwards = getenv("EMU_BACKWARDS");
    const int warps = (count + 31) / 32;
    int idle = 0;
    while (live > 0) {
        bool moved = false;
        for (int k = 0; k < warps; k++) {
            const int w = backwards ? warps - 1 - k : k;
            for (bool again = true; again;) {
                again = false;
                for (int i = w * 32; i < w * 32 + 32 && i < count; i++) {
                    if (fibers[i].st == DONE || fibers[i].st == AT_BARRIER) continue;
                    if (fibers[i].st == AT_WARP && !all_posted(i)) continue;
                    current = i;
                    emu_thread.x = (unsigned)i;
                    emu_switch(&home, fibers[i].sp);
                    again = moved = true;
                }
            }
        }
        idle = moved ? 0 : idle + 1;
        if (idle > 2) fprintf(stderr, "emulator: a block that cannot go on\n"), abort();
    }
}

void emu_run(dim3 grid, dim3 block, size_t smem, const std::function<void()> &kernel) {
    if (!stacks) stacks = (char *)aligned_alloc(64, (size_t)MOST * STACK);
    count = (int)block.x;
    blockDim = block;
    gridDim = grid;
    body = &kernel;
    char *dyn = (char *)aligned_alloc(256, (smem + 511) / 256 * 256);
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = dim3(x, y, z);
                memset(dyn, 0xa5, smem);
                emu_dyn = dyn;
                run_block();
            }
    free(dyn);
}
