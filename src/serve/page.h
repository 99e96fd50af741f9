/* page.h - the built-in web page, serve/page.html as it stands in the source tree. */
#ifndef NIBBLE_PAGE_H
#define NIBBLE_PAGE_H

#include "base/str.h"

/* UTF-8, text/html. It needs nothing but this server's API under relative paths. */
str page_html(void);
/* The Content-Security-Policy to send with it: the page's own, and no framing. */
extern const char PAGE_SECURITY_POLICY[];

#endif
