# nibble - GNU make. `make help` lists the targets and the variables.
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DELETE_ON_ERROR:
.SECONDARY:

VERSION := 0.1.0
Q       := $(if $(V),,@)
HOST    := $(shell uname -m)
ARCH    ?= $(HOST)
PREFIX  ?= /usr/local
PKGS    := yajl libpcre2-8 libutf8proc
# libevent-dev of two architectures cannot be installed side by side (it is not Multi-Arch: same, and libopenmpi-dev wants the
# native one), so a cross build takes its headers, which are alike, and links the other architecture's run-time libraries.
EVENT   := libevent_core libevent_extra
COMMIT  := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)

# ---- configuration: each one (ARCH, CC, SAN, FUZZER) builds into a folder of its own ------------------------------------
CC    := $(if $(filter default,$(origin CC)),gcc,$(CC))
AR    := $(if $(filter default,$(origin AR)),ar,$(AR))
comma := ,
tag   := $(ARCH)-$(notdir $(firstword $(CC)))$(if $(SAN),-$(subst $(comma),-,$(SAN)))$(if $(FUZZER),-fuzzer)$(if $(filter 0,$(MPI)),-nompi)$(if $(filter 0,$(CUDA)),-nocuda)
B     ?= build/$(tag)

ifneq ($(ARCH),$(HOST))
  # Cross build against Debian's multiarch libraries; its programs run under qemu-user with the loader of the same
  # packages. (The cross compiler's own loader, /usr/$(TARGET)/lib, may be an older build than their libc: then the two
  # disagree about the loader's lists, and the first pthread_create walks one of them for ever.)
  TARGET     := $(ARCH)-linux-gnu
  override CC := $(if $(findstring clang,$(CC)),$(CC) --target=$(TARGET),$(TARGET)-gcc)
  RUNNER     ?= qemu-$(ARCH) -L /
  PKG_CONFIG := PKG_CONFIG_LIBDIR=/usr/lib/$(TARGET)/pkgconfig:/usr/share/pkgconfig pkg-config
else
  PKG_CONFIG := pkg-config
endif

WARN     := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wpointer-arith -Wwrite-strings \
            $(if $(WERROR),-Werror)
SANFLAGS := $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all)
override CPPFLAGS += -Isrc -D_GNU_SOURCE $(shell $(PKG_CONFIG) --cflags $(PKGS)) $(shell pkg-config --cflags $(EVENT))
CFLAGS   ?= -O2 -g
override CFLAGS   += -std=c11 -ffp-contract=off -fno-strict-aliasing -pthread $(WARN) $(SANFLAGS) \
            $(if $(FUZZER),-fsanitize=fuzzer-no-link)
override LDFLAGS  += $(SANFLAGS)
LDLIBS   := $(shell $(PKG_CONFIG) --libs $(PKGS)) \
            $(if $(TARGET),-l:libevent_core-2.1.so.7 -l:libevent_extra-2.1.so.7,$(shell pkg-config --libs $(EVENT))) -lm -pthread
EDIT     := $(shell $(PKG_CONFIG) --libs libedit 2>/dev/null)
# Open MPI, for `mpirun nibble quantize`: used when it is found, MPI=0 leaves it out. Not in sanitizer builds (its own leaks
# would be reported) nor in cross builds. Linked only into what needs it.
ifeq ($(if $(filter 0,$(MPI)),no)$(SAN)$(FUZZER)$(filter-out $(HOST),$(ARCH)),)
  MPI_CPPFLAGS := $(shell pkg-config --cflags ompi-c 2>/dev/null || mpicc --showme:compile 2>/dev/null)
  MPI_LIBS     := $(shell pkg-config --libs ompi-c 2>/dev/null || mpicc --showme:link 2>/dev/null)
endif
ifneq ($(MPI_LIBS),)
  override CPPFLAGS += -DNIBBLE_MPI $(patsubst -I%,-isystem%,$(filter -I%,$(MPI_CPPFLAGS)))
  LDLIBS += -Wl,--push-state,--as-needed $(filter-out -pthread,$(MPI_LIBS)) -Wl,--pop-state
endif
# CUDA, for --device cuda: used when nvcc is found, CUDA=0 leaves it out. Its runtime is linked statically, so that the program
# starts on machines without a driver. Not in sanitizer and cross builds.
ifeq ($(if $(filter 0,$(CUDA)),no)$(SAN)$(FUZZER)$(filter-out $(HOST),$(ARCH)),)
  NVCC := $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
endif
ifneq ($(NVCC),)
  CCACHE := $(findstring ccache,$(notdir $(realpath $(shell command -v $(CC)))))
  # Machine code for each generation, and PTX of the newest for those to come. CUDA_ARCH=90 builds one of them, quickly.
  CUDA_KNOWN := $(shell $(NVCC) --list-gpu-code 2>/dev/null)
  CUDA_ARCH  ?= $(patsubst sm_%,%,$(filter sm_80 sm_86 sm_89 sm_90 sm_120 sm_121,$(CUDA_KNOWN)))
  # No contraction: every fma is written (NUMERICS).
  NVFLAGS := -O3 -std=c++17 -fmad=false -Isrc -Xfatbin -compress-all -Xcompiler -Wall,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$(a),code=sm_$(a)) \
             -gencode arch=compute_$(lastword $(CUDA_ARCH)),code=compute_$(lastword $(CUDA_ARCH))
  CUDA_LIB := $(firstword $(wildcard $(addsuffix /libcudart_static.a,$(addprefix $(patsubst %/bin/nvcc,%,$(NVCC)),/lib64 /lib /lib/x86_64-linux-gnu))))
  override CPPFLAGS += -DNIBBLE_CUDA
  LDLIBS += $(or $(CUDA_LIB),-lcudart_static) -ldl -lrt
endif
VFLAGS   := -DNIBBLE_VERSION='"$(VERSION)"' -DNIBBLE_COMMIT='"$(COMMIT)"' -DNIBBLE_PREFIX='"$(PREFIX)"'

# One C file, one ISA: flags by suffix, nothing else in the tree gets any.
ISA_avx2   := -mavx2 -mfma -mf16c
ISA_avx512 := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx2 -mfma -mf16c
ISA_amx    := $(ISA_avx512) -mavx512vbmi -mavx512vbmi2 -mamx-tile -mamx-int8
ISA_dotprod := -march=armv8.2-a+dotprod
isa_of      = $(lastword $(subst _, ,$(basename $(notdir $(1)))))

# ---- sources -----------------------------------------------------------------------------------------------------------
SRC := $(sort $(wildcard src/*/*.c))
ifeq ($(ARCH),x86_64)
  SRC := $(filter-out %_neon.c %_dotprod.c,$(SRC))
  # The reference kernels once more with hardware FMA: the same bits (fmaf is exact), tests run faster.
  FMA := $(patsubst %.c,$(B)/%_fma.o,$(wildcard src/kern/*_ref.c))
else
  SRC := $(filter-out %_avx2.c %_avx512.c %_amx.c,$(SRC))
endif
CU      := $(if $(NVCC),$(sort $(wildcard src/ops/cuda/*.cu)))
OBJ     := $(SRC:%.c=$(B)/%.o) $(FMA) $(CU:%.cu=$(B)/%.cu.o)
LIB     := $(B)/libnibble.a
BIN     := $(B)/nibble
TESTLIB := $(patsubst %.c,$(B)/%.o,$(sort $(wildcard tests/lib/*.c)))
TESTS   := $(patsubst %.c,$(B)/%,$(sort $(wildcard tests/*/test_*.c tests/*/*check.c)))
FUZZ    := $(patsubst %.c,$(B)/%,$(sort $(wildcard tests/fuzz/fuzz_*.c)))
BENCHES := $(patsubst %.c,$(B)/%,$(sort $(wildcard bench/*.c)))
EXAMPLE := $(B)/examples/embed
CLI     := $(if $(wildcard tests/cli/*.cases),tests/cli/run_cli.py)

.PHONY: all help test tests lint format fuzz replay install uninstall clean bench compile_commands.json FORCE
all: $(BIN) $(EXAMPLE) ## build the program and the example (default)

# A stable name for the last plain build of this machine.
ifeq ($(ARCH)$(SAN)$(FUZZER)$(filter 0,$(MPI) $(CUDA)),$(HOST))
all: build/nibble
build/nibble: $(BIN) FORCE
	@ln -sfn $(tag)/nibble $@
endif

$(BIN): $(B)/src/main.o $(LIB)
	$(if $(V),,@echo "  LD   $@")
	$(Q)$(CC) $(LDFLAGS) $(CFLAGS) -o $@ $^ $(LDLIBS) $(EDIT)

$(LIB): $(OBJ)
	@rm -f $@
	$(if $(V),,@echo "  AR   $@")
	$(Q)$(AR) rcs $@ $^

# Files that change only when the flags (or, for the few objects that print it, the version) do.
$(B)/flags: FORCE
	@mkdir -p $(@D); printf '%s\n' '$(subst ','\'',$(CC) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) $(LDLIBS) $(EDIT))' "$$($(CC) --version | head -n 1)" > $@.new; \
	cmp -s $@.new $@ && rm $@.new || mv $@.new $@
$(B)/version: FORCE
	@mkdir -p $(@D); printf '%s\n' '$(subst ','\'',$(VFLAGS))' > $@.new; cmp -s $@.new $@ && rm $@.new || mv $@.new $@

$(B)/src/main.o $(B)/src/cmd/%.o: override CPPFLAGS += $(VFLAGS)
$(B)/src/main.o $(filter $(B)/src/cmd/%,$(OBJ)): $(B)/version

$(B)/src/%.o: src/%.c $(B)/flags
	@mkdir -p $(@D)
	$(if $(V),,@echo "  CC   $<")
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) $(ISA_$(call isa_of,$<)) $(if $(and $(SAN),$(findstring clang,$(CC)),$(filter avx2 avx512 amx,$(call isa_of,$<))),-fno-sanitize=undefined) -MMD -MP -c -o $@ $<

$(B)/src/serve/page.o: src/serve/page.html # through .incbin, which the compiler's list of dependencies does not show

$(B)/src/kern/%_ref_fma.o: src/kern/%_ref.c $(B)/flags
	@mkdir -p $(@D)
	$(if $(V),,@echo "  CC   $<")
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -mfma -DKERN_REF_FMA -MMD -MP -c -o $@ $<

$(B)/%.cu.o: %.cu $(B)/nvflags
	@mkdir -p $(@D)
	$(if $(V),,@echo "  NVCC $<")
	$(Q)$(CCACHE) $(NVCC) $(NVFLAGS) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<
$(B)/nvflags: FORCE
	@mkdir -p $(@D); printf '%s\n' '$(NVCC) $(NVFLAGS)' > $@.new; cmp -s $@.new $@ && rm $@.new || mv $@.new $@

# Programs of tests/ and bench/: one C file each plus the library (tests may share code in tests/lib/*.c).
$(B)/tests/%.o: tests/%.c $(B)/flags
	@mkdir -p $(@D)
	$(if $(V),,@echo "  CC   $<")
	$(Q)$(CC) $(CPPFLAGS) -Itests $(CFLAGS) -Wno-missing-prototypes -MMD -MP -c -o $@ $<
# What embeds the library needs nothing of ours but the sources' folder and what docs/EMBEDDING.md says to link.
$(EXAMPLE): examples/embed.c $(LIB) $(B)/flags
	@mkdir -p $(@D)
	$(if $(V),,@echo "  LD   $@")
	$(Q)$(CC) -std=c11 -D_GNU_SOURCE -Isrc $(WARN) $(SANFLAGS) $(if $(FUZZER),-fsanitize=fuzzer-no-link) -O2 -g -MMD -MP -o $@ $< $(LIB) $(shell $(PKG_CONFIG) --cflags --libs $(PKGS)) $(if $(NVCC),$(CUDA_LIB) -ldl -lrt) -lm -pthread
$(B)/bench/%.o: bench/%.c $(B)/flags
	@mkdir -p $(@D)
	$(if $(V),,@echo "  CC   $<")
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

$(TESTS): $(B)/%: $(B)/%.o $(TESTLIB) $(LIB)
	$(if $(V),,@echo "  LD   $@")
	$(Q)$(CC) $(CFLAGS) -o $@ $< $(TESTLIB) $(LDFLAGS) $(LIB) -lcmocka $(LDLIBS)
$(BENCHES): $(B)/%: $(B)/%.o $(LIB)
	$(if $(V),,@echo "  LD   $@")
	$(Q)$(CC) $(CFLAGS) -o $@ $< $(LDFLAGS) $(LIB) $(LDLIBS)
ifdef FUZZER
$(FUZZ): $(B)/%: $(B)/%.o $(LIB)
	$(if $(V),,@echo "  LD   $@")
	$(Q)$(CC) $(CFLAGS) -fsanitize=fuzzer -o $@ $< $(LDFLAGS) $(LIB) $(LDLIBS)
else
$(FUZZ): $(B)/%: $(B)/%.o $(B)/tests/fuzz/replay_main.o $(LIB)
	$(if $(V),,@echo "  LD   $@")
	$(Q)$(CC) $(CFLAGS) -o $@ $< $(B)/tests/fuzz/replay_main.o $(LDFLAGS) $(LIB) $(LDLIBS)
endif

# ---- tests -------------------------------------------------------------------------------------------------------------
# T narrows each of these: `make test T=json` runs the programs with json in their path.
tests: $(TESTS) $(FUZZ) ## build every C test program
bench: $(BENCHES) ## build the benchmark programs

chosen = $(if $(T),$(foreach f,$(1),$(if $(strip $(foreach t,$(T),$(findstring $(t),$(f)))),$(f))),$(1))
test: all $(call chosen,$(TESTS) $(FUZZ)) ## build and run the C tests, fuzz corpora and command-line cases (T=word narrows)
	@RUNNER='$(RUNNER)' NIBBLE=$(BIN) scripts/run_tests.sh $(if $(T),,$(CLI)) $(call chosen,$(TESTS) $(FUZZ))

replay: $(FUZZ) ## run every fuzz target over its stored corpus
	@RUNNER='$(RUNNER)' scripts/run_tests.sh $(FUZZ)

SECS ?= 60
fuzz: ## fuzz with libFuzzer under ASan+UBSan (T=name, SECS=60 for each target)
	@T='$(T)' SECS='$(SECS)' scripts/fuzz.sh

lint: ## layer rule, headers, error ids, format, clang-tidy, cppcheck (T=name runs one check)
	@tools/lint/run.sh $(T)

format: ## rewrite sources and tests with clang-format
	@git ls-files 'src/*.[ch]' 'tests/*.[ch]' 'bench/*.[ch]' 'examples/*.c' | xargs -r clang-format -i

# ---- install -----------------------------------------------------------------------------------------------------------
SHARE := $(DESTDIR)$(PREFIX)/share
install: all ## install program, embedded model and man page (DESTDIR=, PREFIX=/usr/local)
	install -d $(DESTDIR)$(PREFIX)/bin $(SHARE)/nibble/qwen36-tiny $(SHARE)/man/man1
	install -m 755 $(BIN) $(DESTDIR)$(PREFIX)/bin/nibble
	install -m 644 assets/qwen36-tiny/* $(SHARE)/nibble/qwen36-tiny/
	install -m 644 assets/*.jsonl $(SHARE)/nibble/
	install -m 644 docs/nibble.1 $(SHARE)/man/man1/nibble.1

uninstall: ## remove what install put there
	rm -rf $(DESTDIR)$(PREFIX)/bin/nibble $(SHARE)/nibble $(SHARE)/man/man1/nibble.1

clean: ## remove all build output
	rm -rf build compile_commands.json

# For editors and clang-tidy.
compile_commands.json: ## the compiler call of every source file, for editors
	@{ sep='['; for f in $(SRC) src/main.c $(patsubst $(B)/%,%.c,$(TESTS) $(FUZZ)); do \
	  isa=$${f%.c}; case $${isa##*_} in avx2) isa='$(ISA_avx2)';; avx512) isa='$(ISA_avx512)';; amx) isa='$(ISA_amx)';; dotprod) isa='$(ISA_dotprod)';; *) isa=;; esac; \
	  printf '%s\n {"directory": "%s", "file": "%s", "command": "%s"}' "$$sep" '$(CURDIR)' "$$f" \
	    '$(subst ",\\\",$(subst ','\'',$(CC) $(CPPFLAGS) $(VFLAGS) -Itests $(CFLAGS)))'" $$isa -c $$f"; sep=','; done; echo; echo ']'; } > $@

help: ## this list
	@echo 'make [TARGET] [CC=gcc|clang] [SAN=address,undefined|thread] [WERROR=1] [ARCH=aarch64] [MPI=0] [CUDA=0] [V=1]'
	@grep -hE '^[a-z_.]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

-include $(OBJ:.o=.d) $(B)/src/main.d $(TESTLIB:.o=.d) $(TESTS:=.d) $(FUZZ:=.d) $(BENCHES:=.d) $(EXAMPLE).d $(B)/tests/fuzz/replay_main.d
