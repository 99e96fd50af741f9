/* Writing side of safetensors.h. What is written here passes st_open: wrong plans are bugs, not errors. */
#include "ckpt/safetensors.h"

static str out_name(const void *ctx, uint32_t i) { return str_of(((const st_out *)ctx)[i].name); }

static uint64_t out_bytes(const st_out *t) {
    uint64_t n = (uint64_t)dtype_bytes(t->type);
    CHECK(t->rank >= 0 && t->rank <= ST_MAX_RANK, "tensor %s: rank %d", t->name, t->rank);
    for (int i = 0; i < t->rank; i++) {
        CHECK(t->shape[i] >= 0, "tensor %s: negative dimension", t->name);
        CHECK(!__builtin_mul_overflow(n, (uint64_t)t->shape[i], &n), "tensor %s: too large", t->name);
    }
    return n;
}

static void check_names(const st_out *tensors, int count) {
    strtab seen = { 0 };
    CHECK(strtab_init(&seen, (size_t)count), "out of memory for %d names", count);
    for (int i = 0; i < count; i++) {
        const str name = str_of(tensors[i].name);
        CHECK(name.n > 0 && name.n <= ST_MAX_NAME && !str_eq(name, STR("__metadata__")), "bad tensor name '%s'",
              name.p);
        CHECK(strtab_put(&seen, name, (uint32_t)i, out_name, tensors) == (uint32_t)i, "tensor %s twice", name.p);
    }
    strtab_free(&seen);
}

void st_header_begin(buf *b, const json *metadata) {
    buf_add(b, "\0\0\0\0\0\0\0", 8);
    buf_byte(b, '{');
    if (!metadata) return;
    buf_puts(b, "\"__metadata__\":");
    json_write(b, metadata);
}

uint64_t st_header_entry(buf *b, str name, dtype type, int rank, const int64_t *shape, uint64_t at, uint64_t bytes) {
    const uint64_t end = at + bytes;
    if (b->p[b->n - 1] != '{') buf_byte(b, ',');
    json_write_str(b, name);
    buf_printf(b, ":{\"dtype\":\"%s\",\"shape\":[", dtype_name(type));
    for (int d = 0; d < rank; d++) buf_printf(b, "%s%lld", d ? "," : "", (long long)shape[d]);
    buf_printf(b, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at, (unsigned long long)end);
    return end;
}

void st_header_end(buf *b) {
    buf_byte(b, '}');
    while (b->n % 8) buf_byte(b, ' ');
    for (int i = 0; i < 8; i++) b->p[i] = (char)((uint64_t)(b->n - 8) >> (8 * i) & 0xff);
}

/* Length, header and padding; returns the bytes of data that must follow. */
static uint64_t plan(buf *b, const st_out *tensors, int count) {
    uint64_t at = 0;
    check_names(tensors, count);
    st_header_begin(b, NULL);
    for (int i = 0; i < count; i++) {
        const st_out *t = &tensors[i];
        const uint64_t bytes = out_bytes(t);
        CHECK(at + bytes >= at && at + bytes <= INT64_MAX, "tensor %s: file too large", t->name);
        at = st_header_entry(b, str_of(t->name), t->type, t->rank, t->shape, at, bytes);
    }
    st_header_end(b);
    CHECK(b->n - 8 <= ST_MAX_HEADER, "header of %zu bytes", b->n - 8);
    return at;
}

bool st_writer_open(st_writer *w, const char *path, const st_out *tensors, int count, err *e) {
    buf header = { 0 };
    *w = (st_writer){ 0 };
    w->expected = plan(&header, tensors, count);
    const bool ok = file_out_open(&w->out, path, e) && file_out_write(&w->out, header.p, header.n, e);
    buf_free(&header);
    if (!ok) file_out_abort(&w->out);
    return ok;
}

bool st_writer_add(st_writer *w, const void *p, size_t n, err *e) {
    CHECK(n <= w->expected - w->written, "%zu bytes more than planned", n - (size_t)(w->expected - w->written));
    w->written += n;
    return file_out_write(&w->out, p, n, e);
}

bool st_writer_commit(st_writer *w, err *e) {
    CHECK(w->written == w->expected, "%llu of %llu planned bytes written", (unsigned long long)w->written,
          (unsigned long long)w->expected);
    const bool ok = file_out_commit(&w->out, e);
    file_out_abort(&w->out);
    return ok;
}

void st_writer_abort(st_writer *w) { file_out_abort(&w->out); }

bool st_write(const char *path, const st_out *tensors, int count, err *e) {
    st_writer w;
    if (!st_writer_open(&w, path, tensors, count, e)) return false;
    bool ok = true;
    for (int i = 0; ok && i < count; i++) ok = st_writer_add(&w, tensors[i].data, (size_t)out_bytes(&tensors[i]), e);
    ok = ok && st_writer_commit(&w, e);
    st_writer_abort(&w);
    return ok;
}
