# nibble - GNU make. `make help` lists the targets.
#   CC=gcc|clang   SAN=address,undefined | thread   WERROR=1   ARCH=aarch64 (cross, runs under qemu-user)
MAKEFLAGS += --no-builtin-rules
CC      := $(if $(filter default,$(origin CC)),gcc,$(CC))
ARCH    ?= $(shell uname -m)
HOST    := $(shell uname -m)
PREFIX  ?= /usr/local
VERSION := 0.1.0
COMMIT  := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
PKGS    := yajl libpcre2-8 libutf8proc

comma := ,
tag   := $(ARCH)-$(notdir $(CC))$(if $(SAN),-$(subst $(comma),-,$(SAN)))
B     ?= build/$(tag)

ifneq ($(ARCH),$(HOST))
  TARGET     := $(ARCH)-linux-gnu
  CC         := $(TARGET)-gcc
  RUNNER     ?= qemu-$(ARCH) -L /usr/$(TARGET)
  PKG_CONFIG := PKG_CONFIG_LIBDIR=/usr/lib/$(TARGET)/pkgconfig:/usr/share/pkgconfig pkg-config
else
  PKG_CONFIG := pkg-config
endif
AR ?= ar

CPPFLAGS += -Isrc -I$(B)/gen -D_GNU_SOURCE $(shell $(PKG_CONFIG) --cflags $(PKGS))
WARN     := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wpointer-arith -Wwrite-strings $(if $(WERROR),-Werror)
CFLAGS   ?= -O2 -g
CFLAGS   += -std=c11 -ffp-contract=off -fno-strict-aliasing -pthread $(WARN) $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all)
LDLIBS   := $(shell $(PKG_CONFIG) --libs $(PKGS)) -lm -pthread
LDFLAGS  += $(if $(SAN),-fsanitize=$(SAN))
EDIT     := $(shell $(PKG_CONFIG) --cflags --libs libedit 2>/dev/null)

# One C file, one ISA: flags by suffix, nothing else in the tree gets any.
ISA_avx2   := -mavx2 -mfma -mf16c
ISA_avx512 := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx2 -mfma -mf16c
ISA_amx    := $(ISA_avx512) -mamx-tile -mamx-int8
ISA_neon   :=

SRC := $(sort $(wildcard src/*/*.c))
ifeq ($(ARCH),x86_64)
  SRC := $(filter-out %_neon.c,$(SRC))
else
  SRC := $(filter-out %_avx2.c %_avx512.c %_amx.c,$(SRC))
endif
OBJ     := $(SRC:%.c=$(B)/%.o)
# The reference kernels once more with hardware FMA: the same bits (fmaf is exact), tests run faster.
ifeq ($(ARCH),x86_64)
  OBJ   += $(patsubst %.c,$(B)/%_fma.o,$(wildcard src/kern/*_ref.c))
endif
LIB     := $(B)/libnibble.a
BIN     := $(B)/nibble
TESTS   := $(patsubst tests/%.c,$(B)/tests/%,$(sort $(wildcard tests/*/test_*.c tests/*/*check.c)))
BENCHES := $(patsubst bench/%.c,$(B)/bench/%,$(sort $(wildcard bench/*.c)))

.PHONY: all help test lint fuzz install clean bench tests compile_commands.json
.SECONDARY:
all: $(BIN) nibble ## build the program (default)

# A stable name for the last build of the host's own configuration.
nibble: $(BIN)
	@ln -sfn $(BIN) build/nibble

$(BIN): $(B)/src/main.o $(LIB)
	$(CC) $(LDFLAGS) $(CFLAGS) -o $@ $^ $(LDLIBS) $(EDIT)

$(LIB): $(OBJ)
	@rm -f $@
	$(AR) rcs $@ $^

isa_of = $(lastword $(subst _, ,$(basename $(notdir $(1)))))
$(B)/src/%.o: src/%.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(ISA_$(call isa_of,$<)) -MMD -MP -c -o $@ $<

$(B)/src/kern/%_ref_fma.o: src/kern/%_ref.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -mfma -DKERN_REF_FMA -MMD -MP -c -o $@ $<

$(B)/src/main.o $(B)/src/cmd/%.o: CPPFLAGS += -DNIBBLE_VERSION='"$(VERSION)"' -DNIBBLE_COMMIT='"$(COMMIT)"' -DNIBBLE_PREFIX='"$(PREFIX)"'

$(B)/tests/%: tests/%.c $(LIB)
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) -Itests $(CFLAGS) -Wno-missing-prototypes -MMD -MP -o $@ $< $(LDFLAGS) $(LIB) -lcmocka $(LDLIBS)

$(B)/bench/%: bench/%.c $(LIB)
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -o $@ $< $(LDFLAGS) $(LIB) $(LDLIBS)

tests: $(TESTS) ## build every C test program
bench: $(BENCHES) ## build the benchmark programs

test: all tests ## build and run the tests (SAN=, ARCH=, CC= choose the configuration)
	RUNNER='$(RUNNER)' NIBBLE=$(BIN) scripts/run_tests.sh $(TESTS)

clean: ## remove all build output
	rm -rf build compile_commands.json

help: ## this list
	@grep -hE '^[a-z_.]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

-include $(OBJ:.o=.d) $(B)/src/main.d $(TESTS:=.d) $(BENCHES:=.d)
