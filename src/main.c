#include <stdio.h>
int main(void) { puts("nibble"); return 0; }
