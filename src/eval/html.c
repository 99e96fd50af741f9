#include "eval/html.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static void escaped(buf *b, str s) {
    for (size_t i = 0; i < s.n; i++) {
        const char c = s.p[i];
        if (c == '<')
            buf_puts(b, "&lt;");
        else if (c == '>')
            buf_puts(b, "&gt;");
        else if (c == '&')
            buf_puts(b, "&amp;");
        else if (c == '"')
            buf_puts(b, "&quot;");
        else
            buf_byte(b, c);
    }
}

void html_begin(buf *b, const char *title) {
    buf_puts(b, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
                "<meta name=\"viewport\" content=\"width=device-width\"><title>");
    escaped(b, str_of(title));
    buf_puts(
        b,
        "</title>\n<style>\n"
        ":root{color-scheme:light dark;--ink:#1b1f24;--dim:#667;--line:#d6dae0;--bar:#3b7dd8;--paper:#fff}\n"
        "@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--dim:#99a;--line:#3a3f47;--bar:#6ea8ff;--paper:#16181c}"
        "}\n"
        "body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;margin:2rem "
        "auto;padding:0 1rem}\n"
        "table{border-collapse:collapse;margin:1rem "
        "0;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}\n"
        "th,td{padding:.25rem .8rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}\n"
        "th:first-child,td:first-child{text-align:left;padding-left:0}\nth{color:var(--dim);font-weight:600}\n"
        "svg{max-width:100%;height:auto;display:block;margin:1rem 0}\n"
        "svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .dim{fill:var(--dim)}\n"
        "svg rect{fill:var(--bar)}svg line{stroke:var(--ink);stroke-width:1}\n</style></head><body>\n<h1>");
    escaped(b, str_of(title));
    buf_puts(b, "</h1>\n");
}

void html_end(buf *b) { buf_puts(b, "</body></html>\n"); }

void html_heading(buf *b, const char *text) {
    buf_puts(b, "<h2>");
    escaped(b, str_of(text));
    buf_puts(b, "</h2>\n");
}

void html_text(buf *b, str text) {
    buf_puts(b, "<p>");
    escaped(b, text);
    buf_puts(b, "</p>\n");
}

void html_table_begin(buf *b) { buf_puts(b, "<table>\n"); }
void html_table_end(buf *b) { buf_puts(b, "</table>\n"); }
void html_row_begin(buf *b) { buf_puts(b, "<tr>"); }
void html_row_end(buf *b) { buf_puts(b, "</tr>\n"); }

void html_cell(buf *b, bool heading, const char *fmt, ...) {
    va_list ap;
    buf text = { 0 };
    va_start(ap, fmt);
    buf_vprintf(&text, fmt, ap);
    va_end(ap);
    buf_puts(b, heading ? "<th>" : "<td>");
    escaped(b, buf_view(&text));
    buf_puts(b, heading ? "</th>" : "</td>");
    buf_free(&text);
}

void html_bars(buf *b, const char *title, const html_bar *bars, int n, int digits) {
    enum { LEFT = 190, WIDE = 420, STEP = 22, TOP = 30, ALL = LEFT + WIDE + 150 };
    double most = 0;
    for (int i = 0; i < n; i++) {
        if (bars[i].v.value > most) most = bars[i].v.value;
        if (bars[i].v.hi > most) most = bars[i].v.hi;
    }
    const double scale = most > 0 ? WIDE / most : 0;
    const int high = TOP + n * STEP + 6;
    buf_printf(b,
               "<svg viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n<text x=\"0\" y=\"16\" "
               "font-weight=\"600\">",
               ALL, high, ALL, high);
    escaped(b, str_of(title));
    buf_puts(b, "</text>\n");
    for (int i = 0; i < n; i++) {
        const stat_interval v = bars[i].v;
        const int y = TOP + i * STEP;
        buf_printf(b, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">", LEFT - 8, y + 13);
        escaped(b, str_of(bars[i].label));
        buf_puts(b, "</text>");
        double end = LEFT;
        if (v.value > 0) {
            buf_printf(b, "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"14\" rx=\"2\"/>", LEFT, y + 2,
                       v.value * scale);
            end = LEFT + v.value * scale;
        }
        if (v.hi > 0 && !isnan(v.lo)) {
            const double lo = LEFT + fmax(v.lo, 0) * scale, hi = LEFT + v.hi * scale;
            buf_printf(b, "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\"/>", lo, y + 9, hi, y + 9);
            end = fmax(end, hi);
        }
        char number[64] = "-";
        if (!isnan(v.value)) snprintf(number, sizeof number, "%.*g", digits, v.value);
        buf_printf(b, "<text class=\"dim\" x=\"%.1f\" y=\"%d\">%s</text>\n", end + 6, y + 13, number);
    }
    buf_puts(b, "</svg>\n");
}
