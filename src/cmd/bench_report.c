/* Tables of `nibble bench` on the terminal, as JSON and as CSV: one source for all three. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "cmd/bench.h"
#include "cmd/eval.h"

static bench_cell *next_cell(bench_table *t) {
    if (t->at == t->rows * t->n_cols) {
        t->rows++;
        t->cells = xrealloc(t->cells, (size_t)t->rows * (size_t)t->n_cols * sizeof *t->cells);
        for (int i = t->at; i < t->rows * t->n_cols; i++) t->cells[i] = (bench_cell){ .v = NAN };
    }
    return &t->cells[t->at++];
}

void bench_number(bench_table *t, double v) { next_cell(t)->v = v; }

void bench_text(bench_table *t, const char *text) {
    bench_cell *c = next_cell(t);
    snprintf(c->text, sizeof c->text, "%s", text);
}

static void cell_text(char *out, size_t n, const bench_column *c, const bench_cell *x) {
    if (c->digits < 0)
        snprintf(out, n, "%s", x->text);
    else if (isfinite(x->v))
        snprintf(out, n, "%.*f", c->digits, x->v);
    else
        snprintf(out, n, "-");
}

void bench_table_print(const bench_table *t, int table) {
    for (int row = -1; row < t->rows; row++) {
        for (int c = 0; c < t->n_cols; c++) {
            const bench_column *col = &t->cols[c];
            if (!(col->tables & table)) continue;
            char text[200];
            size_t width = strlen(col->head);
            for (int r = 0; r < t->rows; r++) {
                cell_text(text, sizeof text, col, &t->cells[r * t->n_cols + c]);
                if (strlen(text) > width) width = strlen(text);
            }
            snprintf(text, sizeof text, "%s", col->head);
            if (row >= 0) cell_text(text, sizeof text, col, &t->cells[row * t->n_cols + c]);
            printf(col->digits < 0 ? "  %-*s" : "  %*s", (int)width, text);
        }
        putchar('\n');
    }
}

void bench_table_free(bench_table *t) {
    free(t->cells);
    t->cells = NULL;
    t->rows = t->at = 0;
}

void bench_note(bench_report *r, const char *fmt, ...) {
    va_list ap;
    buf text = { 0 };
    va_start(ap, fmt);
    buf_vprintf(&text, fmt, ap);
    va_end(ap);
    buf_printf(&r->lines, "note: " STR_FMT "\n", STR_ARG(buf_view(&text)));
    if (r->notes.n) buf_byte(&r->notes, ',');
    json_write_str(&r->notes, buf_view(&text));
    buf_free(&text);
}

void bench_machine(bench_report *r, const char *model, const ops *o) {
    buf_printf(&r->lines, "%s, %s, %s, %d threads\n", model, kern_cpu_name(), o->isa, o->threads);
    buf_puts(&r->members, "\"model\":");
    json_write_str(&r->members, str_of(model));
    buf_puts(&r->members, ",\"machine\":");
    json_write_str(&r->members, str_of(kern_cpu_name()));
    buf_printf(&r->members, ",\"device\":\"%s\",\"isa\":\"%s\",\"threads\":%d,\"version\":\"%s\",\"commit\":\"%s\"",
               o->device, o->isa, o->threads, NIBBLE_VERSION, NIBBLE_COMMIT);
}

static void json_rows(buf *b, const bench_table *t) {
    for (int i = 0; i < t->rows * t->n_cols; i++) {
        const int c = i % t->n_cols;
        buf_printf(b, "%s\"%s\":", c ? "," : i ? "},{" : "{", t->cols[c].name);
        if (t->cols[c].digits < 0)
            json_write_str(b, str_of(t->cells[i].text));
        else
            json_write_double(b, t->cells[i].v);
    }
    if (t->rows) buf_byte(b, '}');
}

static void csv_rows(buf *b, const bench_table *t) {
    for (int c = 0; c < t->n_cols; c++) buf_printf(b, "%s%s", c ? "," : "", t->cols[c].name);
    for (int i = 0; i < t->rows * t->n_cols; i++) {
        const int c = i % t->n_cols;
        buf_puts(b, c ? "," : "\n");
        if (t->cols[c].digits < 0)
            buf_puts(b, t->cells[i].text); /* ours: no comma, no quote */
        else if (isfinite(t->cells[i].v))
            json_write_double(b, t->cells[i].v);
    }
    buf_byte(b, '\n');
}

bool bench_report_write(bench_report *r, const bench_options *o, err *e) {
    buf b = { 0 };
    bool ok = true;
    if (cmd_common()->json) {
        if (r->command)
            buf_printf(&b, "{\"schema\":\"nibble.%s.%s/1\",", r->command, r->what);
        else
            buf_printf(&b, "{\"schema\":\"nibble.bench/1\",\"bench\":\"%s\",", r->what);
        eval_json_command(&b);
        buf_byte(&b, ',');
        buf_printf(&b, STR_FMT ",\"notes\":[" STR_FMT "],\"rows\":[", STR_ARG(buf_view(&r->members)),
                   STR_ARG(buf_view(&r->notes)));
        json_rows(&b, &r->table);
        buf_puts(&b, "]}\n");
        fwrite(b.p, 1, b.n, stdout);
        buf_clear(&b);
    } else {
        printf("%s %s: " STR_FMT "\n", r->command ? r->command : "bench", r->what, STR_ARG(buf_view(&r->lines)));
        bench_table_print(&r->table, BENCH_MAIN);
        int parts = 0;
        for (int c = 0; c < r->table.n_cols; c++) parts |= r->table.cols[c].tables == BENCH_PARTS;
        if (parts) {
            puts("\nMB of memory per token:");
            bench_table_print(&r->table, BENCH_PARTS);
        }
    }
    if (o->csv) {
        csv_rows(&b, &r->table);
        ok = file_write_atomic(o->csv, b.p, b.n, e);
    }
    buf_free(&b);
    return ok;
}

void bench_report_free(bench_report *r) {
    bench_table_free(&r->table);
    buf_free(&r->lines);
    buf_free(&r->members);
    buf_free(&r->notes);
}
