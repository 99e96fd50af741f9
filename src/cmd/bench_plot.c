/* A small SVG writer: lines or bars over evenly spaced places, one colour a group, axes with labels. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "cmd/bench.h"

enum { WIDTH = 760, HEIGHT = 430, LEFT = 72, RIGHT = 210, TOP = 44, BOTTOM = 56, MAX_PLACES = 32, MAX_GROUPS = 24 };

typedef struct drawing {
    buf *b;
    const bench_table *t;
    const bench_plot *p;
    double places[MAX_PLACES], top;
    char groups[MAX_GROUPS][84];
    int n_places, n_groups;
} drawing;

static const char *const colours[] = { "#1f6fb4", "#d1495b", "#2e8b57", "#8a5fbf", "#c77f1a", "#3b8ea5",
                                       "#7a7a7a", "#a0522d", "#000000", "#e377c2", "#9acd32", "#4b0082" };

static double value(const drawing *d, int row, int col) {
    return col < 0 ? (double)NAN : d->t->cells[row * d->t->n_cols + col].v;
}

static void group_name(const drawing *d, int row, char *out, size_t n) {
    const int cols[] = { d->p->group_col, d->p->group2_col };
    out[0] = 0;
    for (int i = 0; i < 2; i++) {
        if (cols[i] < 0) continue;
        const bench_cell *c = &d->t->cells[row * d->t->n_cols + cols[i]];
        const size_t at = strlen(out);
        if (d->t->cols[cols[i]].digits < 0)
            snprintf(out + at, n - at, "%s%s", at ? " " : "", c->text);
        else
            snprintf(out + at, n - at, "%s%s %g", at ? " " : "", d->t->cols[cols[i]].head, c->v);
    }
}

static int place_of(const drawing *d, int row) {
    for (int i = 0; i < d->n_places; i++)
        if (d->places[i] == value(d, row, d->p->x_col)) return i;
    return -1;
}

static bool in_group(const drawing *d, int row, int group) {
    char name[84];
    group_name(d, row, name, sizeof name);
    return strcmp(name, d->groups[group]) == 0;
}

static void survey(drawing *d) {
    for (int r = 0; r < d->t->rows; r++) {
        const double x = value(d, r, d->p->x_col);
        if (place_of(d, r) < 0 && d->n_places < MAX_PLACES) {
            int at = d->n_places++;
            for (; at > 0 && d->places[at - 1] > x; at--) d->places[at] = d->places[at - 1];
            d->places[at] = x;
        }
        int g = 0;
        while (g < d->n_groups && !in_group(d, r, g)) g++;
        if (g == d->n_groups && g < MAX_GROUPS) group_name(d, r, d->groups[d->n_groups++], sizeof d->groups[0]);
        const int cols[] = { d->p->y_col, d->p->hi_col, d->p->ref_col };
        for (int i = 0; i < 3; i++) d->top = fmax(d->top, value(d, r, cols[i])); /* fmax passes NaN over */
    }
    d->top = d->top > 0 ? d->top * 1.05 : 1;
}

static double x_at(const drawing *d, double place) {
    return LEFT + (place + 0.5) * (WIDTH - LEFT - RIGHT) / (d->n_places ? d->n_places : 1);
}
static double y_at(const drawing *d, double v) { return HEIGHT - BOTTOM - v / d->top * (HEIGHT - TOP - BOTTOM); }

/* The round step that gives four to ten lines. */
static double step_for(double top) {
    const double ten = pow(10, floor(log10(top)));
    return top / ten < 2 ? ten / 5 : top / ten < 5 ? ten / 2 : ten;
}

static void axes(const drawing *d) {
    const int right = WIDTH - RIGHT, bottom = HEIGHT - BOTTOM;
    const double step = step_for(d->top);
    for (int i = 0; i * step <= d->top; i++) {
        const double v = i * step;
        buf_printf(d->b,
                   "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"#ddd\"/>"
                   "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n",
                   LEFT, y_at(d, v), right, y_at(d, v), LEFT - 6, y_at(d, v) + 4, v);
    }
    for (int i = 0; i < d->n_places; i++)
        buf_printf(d->b, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.0f</text>\n", x_at(d, i), bottom + 18,
                   d->places[i]);
    buf_printf(d->b,
               "<path d=\"M%d %dV%dH%d\" fill=\"none\" stroke=\"#333\"/>\n"
               "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>\n"
               "<text transform=\"translate(16 %d) rotate(-90)\" text-anchor=\"middle\">%s</text>\n"
               "<text x=\"%d\" y=\"22\" font-size=\"15\">%s</text>\n",
               LEFT, TOP, bottom, right, (LEFT + right) / 2, HEIGHT - 14, d->p->x, (TOP + bottom) / 2, d->p->y, LEFT,
               d->p->title);
}

static void path(const drawing *d, int group, int col, const char *style) {
    bool pen = false;
    for (int i = 0; i < d->n_places; i++)
        for (int r = 0; r < d->t->rows; r++) {
            if (!in_group(d, r, group) || place_of(d, r) != i || !isfinite(value(d, r, col))) continue;
            buf_printf(d->b, "%s%.1f %.1f", pen ? " L" : "<path d=\"M", x_at(d, i), y_at(d, value(d, r, col)));
            pen = true;
        }
    if (pen) buf_printf(d->b, "\" fill=\"none\" stroke=\"%s\" %s/>\n", colours[group % (int)ARRAY_LEN(colours)], style);
}

/* One value with its spread: a dot or a bar. */
static void mark(const drawing *d, int group, int row) {
    const char *colour = colours[group % (int)ARRAY_LEN(colours)];
    const double v = value(d, row, d->p->y_col), lo = value(d, row, d->p->lo_col), hi = value(d, row, d->p->hi_col);
    const double shift = (group + 0.5) / d->n_groups - 0.5, wide = 0.7 * (x_at(d, 1) - x_at(d, 0)) / d->n_groups;
    const double x = d->p->bars ? x_at(d, place_of(d, row) + 0.7 * shift) : x_at(d, place_of(d, row));
    const double aside = d->p->bars ? 0 : 3.0 * group; /* spreads of several groups beside each other */
    if (!isfinite(v)) return;
    if (d->p->bars)
        buf_printf(d->b,
                   "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\"/>"
                   "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%.*f</text>\n",
                   x - wide / 2, y_at(d, v), wide, y_at(d, 0) - y_at(d, v), colour, x,
                   y_at(d, fmax(v, isfinite(hi) ? hi : v)) - 5, v < 10, v);
    else
        buf_printf(d->b, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", x, y_at(d, v), colour);
    if (isfinite(lo) && isfinite(hi))
        buf_printf(d->b, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n", x + aside,
                   y_at(d, lo), x + aside, y_at(d, hi), d->p->bars ? "#333" : colour);
}

static void draw(drawing *d) {
    buf_printf(
        d->b,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
        "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
        WIDTH, HEIGHT, WIDTH, HEIGHT);
    axes(d);
    for (int g = 0; g < d->n_groups; g++) {
        const char *colour = colours[g % (int)ARRAY_LEN(colours)];
        if (!d->p->bars) path(d, g, d->p->y_col, "stroke-width=\"2\"");
        path(d, g, d->p->ref_col, "stroke-dasharray=\"5 4\"");
        for (int r = 0; r < d->t->rows; r++)
            if (in_group(d, r, g)) mark(d, g, r);
        if (!d->groups[g][0]) continue; /* only one, without a name */
        const int y = TOP + 8 + 18 * g, x = WIDTH - RIGHT + 14;
        buf_printf(
            d->b, "<rect x=\"%d\" y=\"%d\" width=\"12\" height=\"12\" fill=\"%s\"/><text x=\"%d\" y=\"%d\">%s</text>\n",
            x, y, colour, x + 18, y + 10, d->groups[g]);
    }
    if (d->p->ref_col >= 0)
        buf_printf(d->b, "<text x=\"%d\" y=\"%d\" fill=\"#555\">dashed: read bandwidth's limit</text>\n",
                   WIDTH - RIGHT + 14, TOP + 26 + 18 * d->n_groups);
    buf_puts(d->b, "</svg>\n");
}

bool bench_plot_write(const bench_table *t, const bench_plot *p, const bench_options *o, err *e) {
    if (!o->svg || t->rows == 0) return true;
    buf b = { 0 };
    drawing d = { .b = &b, .t = t, .p = p };
    survey(&d);
    draw(&d);
    const bool ok = file_write_atomic(o->svg, b.p, b.n, e);
    buf_free(&b);
    return ok;
}
