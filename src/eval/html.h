/* html.h - a report that people look at: one HTML file without scripts or outside resources, tables and bars as inline SVG. */
#ifndef NIBBLE_HTML_H
#define NIBBLE_HTML_H

#include "base/buf.h"
#include "eval/stat.h"

void html_begin(buf *b, const char *title);
void html_end(buf *b);
void html_heading(buf *b, const char *text);
void html_text(buf *b, str text); /* a paragraph; escaped */

/* Rows of cells; the first row is the heading. Columns behind the first are right-aligned. */
void html_table_begin(buf *b);
void html_cell(buf *b, bool heading, const char *fmt, ...) PRINTF_LIKE(3, 4);
void html_row_begin(buf *b);
void html_row_end(buf *b);
void html_table_end(buf *b);

/* A horizontal bar for each label with its interval as a whisker (none when lo is NaN); scaled to the largest value. `digits`:
 * significant, of the number beside it. Values that are NaN or negative have no bar. */
typedef struct html_bar {
    const char *label;
    stat_interval v;
} html_bar;
void html_bars(buf *b, const char *title, const html_bar *bars, int n, int digits);

#endif
