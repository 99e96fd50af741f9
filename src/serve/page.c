#include "serve/page.h"

/* The assembler reads the file, so that there is nothing to generate and nothing to keep in step. */
__asm__(".pushsection .rodata\n"
        ".hidden page_begin\n.global page_begin\npage_begin:\n"
        ".incbin \"src/serve/page.html\"\n"
        ".hidden page_end\n.global page_end\npage_end:\n"
        ".byte 0\n"
        ".popsection\n");
extern const char page_begin[], page_end[];

const char PAGE_SECURITY_POLICY[] =
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

str page_html(void) { return (str){ page_begin, (size_t)((uintptr_t)page_end - (uintptr_t)page_begin) }; }
