/* Candidates in order: selection through block maxima for small top-k, buckets sorted on demand for everything else. */
#include <math.h>
#include <string.h>

#include "engine/sampler_impl.h"
#include "num/mathf.h"

/* ---- order ---- */

/* (logit descending, id ascending) is a total order, so the result never depends on the sort algorithm. */
static bool before(const sampler_entry *a, const sampler_entry *b) {
    return a->logit > b->logit || (a->logit == b->logit && a->id < b->id);
}

/* The root is the last in order. */
static void sift_down(sampler_entry *heap, int n, int i) {
    const sampler_entry x = heap[i];
    for (;;) {
        int child = 2 * i + 1;
        if (child >= n) break;
        if (child + 1 < n && before(&heap[child], &heap[child + 1])) child++;
        if (!before(&x, &heap[child])) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = x;
}

static void heapify(sampler_entry *v, int n) {
    for (int i = n / 2 - 1; i >= 0; i--) sift_down(v, n, i);
}

/* In place, no allocation (qsort has one), n log n on every input. */
static void sort_heap(sampler_entry *v, int n) {
    while (n > 1) {
        const sampler_entry last = v[--n];
        v[n] = v[0];
        v[0] = last;
        sift_down(v, n, 0);
    }
}

static void sort(sampler_entry *v, int n) {
    if (n > 16) {
        heapify(v, n);
        sort_heap(v, n);
        return;
    }
    for (int i = 1; i < n; i++) {
        const sampler_entry x = v[i];
        int j = i;
        for (; j > 0 && before(&x, &v[j - 1]); j--) v[j] = v[j - 1];
        v[j] = x;
    }
}

/* ---- the k best ---- */

static void sift_float(float *heap, int n, int i) {
    const float x = heap[i];
    for (;;) {
        int child = 2 * i + 1;
        if (child >= n) break;
        if (child + 1 < n && heap[child + 1] < heap[child]) child++;
        if (!(heap[child] < x)) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = x;
}

/* The k-th largest block maximum: at least k logits are at or above it. -inf with fewer blocks than k. */
static float threshold(const float *maxima, int blocks, int k) {
    float heap[SAMPLER_SELECT]; /* the smallest kept one at the root */
    if (blocks < k) return -INFINITY;
    memcpy(heap, maxima, (size_t)k * sizeof *heap);
    for (int i = k / 2 - 1; i >= 0; i--) sift_float(heap, k, i);
    for (int i = k; i < blocks; i++)
        if (maxima[i] > heap[0]) {
            heap[0] = maxima[i];
            sift_float(heap, k, 0);
        }
    return heap[0];
}

void rank_select(sampler *s, const float *x, int n, int k) {
    CHECK(k > 0 && k <= SAMPLER_SELECT, "%d of %d", k, n);
    const int blocks = (n + KERN_BLOCK - 1) / KERN_BLOCK;
    const float limit = threshold(s->maxima, blocks, k);
    sampler_entry *heap = s->list;
    int kept = 0;
    for (int b = 0; b < blocks; b++) {
        if (s->maxima[b] < limit || s->maxima[b] == -INFINITY) continue;
        const int end = (b + 1) * KERN_BLOCK < n ? (b + 1) * KERN_BLOCK : n;
        for (int i = b * KERN_BLOCK; i < end; i++) {
            if (x[i] < limit || x[i] == -INFINITY) continue;
            const sampler_entry y = { .logit = x[i], .id = i };
            if (kept < k) {
                heap[kept++] = y;
                if (kept == k) heapify(heap, k);
            } else if (before(&y, &heap[0])) {
                heap[0] = y;
                sift_down(heap, k, 0);
            }
        }
    }
    if (kept < k) heapify(heap, kept);
    sort_heap(heap, kept);
    s->n_list = s->sorted = kept;
}

/* ---- everything ---- */

void rank_exp(const sampler *s, float *y, const float *x, int n, float top, float temperature) {
    for (int i = 0; i < n; i++) y[i] = x[i] - top;
    s->k.scale_div(y, y, temperature, n);
    s->k.exp(y, y, n);
}

static uint64_t mass_of(float p) { return (uint64_t)(p * (float)SAMPLER_UNIT); }

/* exp(-28) < 2^-40; the rounding of the product and of the two operations that it stands for is far below the rest. */
float rank_reach(float temperature) { return 28.0f * temperature; }

/* Non-decreasing from better to worse logits, as each of its operations is monotone. */
static int bucket_of(float logit, float top, float temperature) {
    const float z = (logit - top) / temperature * -16.0f;
    return z < SAMPLER_BUCKETS - 1 ? (int)z : SAMPLER_BUCKETS - 1;
}

/* Candidates of one block behind the n that are there already; returns how many there are now. */
static int collect(sampler *s, const float *x, int first, int count, int n, float top, float temperature) {
    float p[KERN_BLOCK];
    rank_exp(s, p, x + first, count, top, temperature);
    for (int i = 0; i < count; i++) {
        const uint64_t mass = mass_of(p[i]);
        s->list[n] = (sampler_entry){ x[first + i], first + i, mass };
        n += mass > 0;
    }
    return n;
}

uint64_t rank_all(sampler *s, const float *x, int n, float top, float temperature) {
    const float limit = top - rank_reach(temperature);
    uint64_t total = 0;
    int count = 0;
    for (int first = 0; first < n; first += KERN_BLOCK)
        if (s->maxima[first / KERN_BLOCK] >= limit && s->maxima[first / KERN_BLOCK] > -INFINITY)
            count = collect(s, x, first, n - first < KERN_BLOCK ? n - first : KERN_BLOCK, count, top, temperature);
    memset(s->fill, 0, sizeof s->fill);
    for (int i = 0; i < count; i++) {
        total += s->list[i].mass;
        s->fill[bucket_of(s->list[i].logit, top, temperature)]++;
    }
    for (int b = 0, end = 0; b < SAMPLER_BUCKETS; b++) {
        const int size = s->fill[b];
        s->fill[b] = end;
        s->ends[b] = end += size;
    }
    for (int i = 0; i < count; i++) s->bins[s->fill[bucket_of(s->list[i].logit, top, temperature)]++] = s->list[i];
    sampler_entry *const found = s->list;
    s->list = s->bins;
    s->bins = found;
    s->n_list = count;
    s->sorted = s->bucket = 0;
    return total;
}

const sampler_entry *rank_at(sampler *s, int i) {
    CHECK(i >= 0 && i < s->n_list, "candidate %d of %d", i, s->n_list);
    while (s->sorted <= i) {
        const int end = s->ends[s->bucket++];
        sort(s->list + s->sorted, end - s->sorted);
        s->sorted = end;
    }
    return &s->list[i];
}

uint64_t rank_weigh(sampler *s, float temperature) {
    uint64_t total = 0;
    for (int i = 0; i < s->n_list; i++) {
        sampler_entry *c = &s->list[i];
        c->mass = mass_of(num_exp((c->logit - s->list[0].logit) / temperature));
        total += c->mass;
    }
    return total;
}
