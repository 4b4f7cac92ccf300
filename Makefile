# Verbs for people. CMakeLists.txt and pyproject.toml describe the build; this calls them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
# The first Python >= 3.10 that can make virtual environments.
FIND_PYTHON = for p in python3.13 python3.12 python3.11 python3.10 python3; do \
	if $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' \
		>/dev/null 2>&1; then echo $$p; exit; fi; done; exit 1
# The CMake that built the Python module, so that build/c stays as it is; without it the system's.
CMAKE = $$(if [ -x $(VENV)/bin/cmake ]; then echo $(CURDIR)/$(VENV)/bin/cmake; else echo cmake; fi)
CTEST = $$(dirname "$(CMAKE)")/ctest
JOBS := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
CLANG_FORMAT = $(VENV)/bin/clang-format
C_FILES = $(wildcard csrc/*/*.[ch] csrc/*/*/*.[ch] tests/c/*.[ch] tests/c/*/*.[ch] \
	tests/fuzz/*.[ch] examples/*.[ch] program/*.[ch])
# What is installed: the environment is renewed when one of these changes.
INPUTS := $(shell find csrc qsf converter bench/qsf_bench -name '*.[ch]' -o -name '*.inc' -o -name '*.py' -o -name '*.pyi') \
	pyproject.toml CMakeLists.txt
COMMA := ,
SPACE := $(subst ,, )
FUZZ_SECONDS ?= 60
PREFIX ?= /usr/local
WHEELS ?= dist
# In these the arithmetic of models is looked at; for the others one instruction set is enough.
ISA_TESTS := forward misuse passes public_api same_bits
# Of these on scalar, which takes ten times as long; that it gives the same bits as the others,
# check_kernels and qsf.selftest see on each of them.
SCALAR_TESTS := misuse public_api
# Of the exhaustive loops of the C tests, where a case is slow or is tried by another verb: see
# tests/c/check.h. `make test-c` in CI runs all cases.
# Of the C tests under emulation: arithmetic of models, plans, files.
MODEL_TESTS := check_file check_isa check_linear check_model check_plan check_reader example_generate
THINNED := export QSF_CHECK_STRIDE=7;
# Quick tests share the cores; slow ones want them for themselves.
QUICK_ARGS ?= -n auto
PYTEST_ARGS ?=
# A newer compiler than ours must not stop a user: its warnings are errors in CI only.
WERROR ?= $(if $(CI),ON,OFF)

# $(call c_tests,folder,flags,ctest's flags): configures, builds and runs the C tests. In build/c the
# objects are there already: the library of the Python package was built there.
c_tests = $(call c_build,$(1),$(2),all); $(call ctest,$(1)) $(3)
c_build = $(CMAKE) -S . -B build/$(1) -DQSF_BUILD_TESTS=ON -DQSF_BUILD_BINDING=OFF \
		-DQSF_WERROR=$(WERROR) $(2) >build/$(1).log 2>&1 || { cat build/$(1).log; exit 1; }; \
	$(CMAKE) --build build/$(1) -j $(JOBS) --target $(3) >>build/$(1).log 2>&1 || \
		{ cat build/$(1).log; exit 1; }
ctest = $(CTEST) --test-dir build/$(1) -j $(JOBS) --timeout 600 --output-on-failure --no-tests=error

.PHONY: help demo link test test-c test-py check check-isa check-ray check-hostile check-san check-arm check-old check-targets check-slow \
	check-musl-python check-windows-python check-real program amalgamation lint format fuzz baseline wheels \
	release install clean
.NOTPARALLEL:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

# ---- the environment ----

# A Ctrl-C while Python itself starts waits for qsf.shell.entry: pip's scripts start with SIGINT
# blocked, where `env` can do that, and unless the path has what `env -S` would not take literally.
install_qsf = PATH="$(CURDIR)/$(VENV)/bin:$$PATH" tools/show_progress.sh build/c \
	$(PY) -m pip install -q --no-build-isolation \
		--config-settings=cmake.define.QSF_WERROR=$(WERROR) -e ".$(1)"; \
	if env --block-signal=INT true 2>/dev/null; then \
		sed -i '1s,^\#!\(/[A-Za-z0-9_./-]*\)$$,\#!/usr/bin/env -S --block-signal=INT \1,' \
			$(VENV)/bin/qsf $(VENV)/bin/qsf-*; fi

build/system.stamp: tools/bootstrap.sh
	@mkdir -p build
	@tools/bootstrap.sh
	@touch $@

$(PY): | build/system.stamp
	@python=$$($(FIND_PYTHON)) || { echo "Python >= 3.10 with venv was not found" >&2; exit 1; }; \
	echo "Creating $(VENV) with $$python"; $$python -m venv $(VENV)

build/tools.stamp: build/system.stamp | $(PY)
	@if ! $(PY) -c 'import scikit_build_core, cffi, cmake, ninja' 2>/dev/null; then \
		$(PY) -m pip install -q "scikit-build-core>=0.11" "cffi>=1.16" "cmake>=3.21" ninja; fi
	@touch $@

build/install.stamp: $(INPUTS) build/tools.stamp | $(PY)
	@echo "Building and installing qsf into $(VENV)"
	@[ -f build/c/build.ninja ] || rm -rf build/c # of another generator, in a clone that is older
	@$(call install_qsf,)
	@touch $@

# What the tests need besides: test runners, oracles, clients of the server.
build/test.stamp: pyproject.toml build/install.stamp
	@$(call install_qsf,[test])
	@touch $@

build/lint.stamp: pyproject.toml build/test.stamp
	@$(call install_qsf,[lint])
	@touch $@

# The clients of qsf serve that are no Python packages, or too large for every environment. An
# index that lacks one is no failure: their tests skip.
build/clients.stamp: tests/clients/requirements.txt tests/clients/package.json
	@$(PY) -m venv build/clients && build/clients/bin/pip install -q -r tests/clients/requirements.txt
	@if command -v npm >/dev/null; then cp tests/clients/package.json build/clients && \
		npm install --silent --no-audit --no-fund --prefix build/clients; fi
	@touch $@

# ---- verbs ----

build/tiny-llama.qsf: examples/tiny-llama/model.safetensors | build/install.stamp
	$(VENV)/bin/qsf convert examples/tiny-llama $@

demo: build/install.stamp build/tiny-llama.qsf ## convert the bundled model, stream a story from it
	$(VENV)/bin/qsf run build/tiny-llama.qsf --prompt "Once upon a time" \
		--max-tokens 120 --temperature 0
	@echo
	@echo "This model of 2.8 million weights only tells stories. For a chat take one that was trained for it:"
	@echo "  $(VENV)/bin/qsf chat FILE.gguf        a GGUF file or a HuggingFace folder"
	@echo "  $(VENV)/bin/qsf list --available      models to download, for the memory that is free"
	@echo "  make link                       makes the command \`qsf\`, by a link in ~/.local/bin"

link: build/install.stamp ## link the command qsf into ~/.local/bin
	@mkdir -p ~/.local/bin
	@if [ -e ~/.local/bin/qsf ] && [ ! -L ~/.local/bin/qsf ]; then \
		echo "~/.local/bin/qsf is there and no link: remove it first" >&2; exit 1; fi
	@ln -sfn "$(CURDIR)/$(VENV)/bin/qsf" ~/.local/bin/qsf
	@case ":$$PATH:" in *":$$HOME/.local/bin:"*) echo "~/.local/bin/qsf: type qsf" ;; \
		*) echo "~/.local/bin/qsf is there; add ~/.local/bin to PATH to type qsf" ;; esac

test: test-c test-py ## the C tests and the quick Python tests

test-c: build/test.stamp ## the C tests
	@$(if $(CI),,$(THINNED)) $(call c_tests,c,-DQSF_BUILD_LIBRARY=ON -DQSF_BUILD_PROGRAM=ON)
	@tests/install/check_program.sh $(CURDIR)/$(VENV)/bin build/c/program/qsf
	@$(PY) tools/check_isa_leaks.py build/c/CMakeFiles/qsf_objects.dir

# What Python compiles is kept, whatever the environment says: rewriting the tests takes 7 s a run.
test-py: export PYTHONDONTWRITEBYTECODE :=
test-py: build/test.stamp ## the quick Python tests
	@$(PY) -m pytest -m "not slow and not golden" $(QUICK_ARGS) $(PYTEST_ARGS)

check-slow: build/test.stamp ## the slow Python tests, all random examples; in CI, with a browser for the reports and all clients
	@if [ -n "$(CI)" ]; then tools/bootstrap.sh page && { $(MAKE) build/clients.stamp || true; }; fi
	@$(PY) -m pytest -m "slow and not golden" $(PYTEST_ARGS)
	@QSF_EXAMPLES=200 $(PY) -m pytest -m "hypothesis and not slow and not golden" $(QUICK_ARGS) \
		$(PYTEST_ARGS)

# What skips, and why, is said: -rs. A pip that finds no llama.cpp is no failure, its tests skip.
check-real: build/test.stamp ## real models: MODELS=FOLDER with GGUF files; TABLE=docs/quality.md writes the table there
	@test -n "$(wildcard $(MODELS)/*.gguf)" || { echo "check-real: MODELS must name a folder with GGUF" \
		"files, not '$(MODELS)'; tools/fetch_real.sh FOLDER fetches two" >&2; exit 1; }
	@$(PY) -c 'import xllamacpp' 2>/dev/null || $(PY) -m pip install -q xllamacpp || true
	@QSF_REAL_MODELS="$(abspath $(MODELS))" QSF_REAL_TABLE="$(TABLE)" \
		$(PY) -m pytest -rsx -m real tests/python/real $(PYTEST_ARGS)

# Ray takes 500 MB, so it has a folder of its own, with the packages of the environment behind it.
check-ray: build/test.stamp ## batches and stages on a real Ray: processes of this machine stand for others
	@test -e build/ray/bin/ray || { $(PY) -m venv build/ray && \
		build/ray/bin/python -m pip install -q "$$(sed -n 's/^ray = \["\(.*\)"\].*/\1/p' pyproject.toml)"; }
	@$(PY) -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		>"$$(build/ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/qsf.pth"
	@build/ray/bin/python -m pytest -rs -m "slow or not slow" tests/python/machines $(PYTEST_ARGS)

check: lint check-isa check-san check-slow test ## everything that this machine can run

# Not on the best level: `make test` takes that one.
check-isa: build/test.stamp ## the C tests and those of models, on each lower instruction set
	@levels=$$($(PY) -c 'from qsf.native._qsf import ffi, lib; m = ffi.new("qsf_machine *"); \
		assert lib.qsf_machine_describe(m) == 0; best = ffi.string(m.isa_name); \
		print(*(isa.decode() for isa in ffi.string(m.isa_available).split() if isa != best))'); \
	for isa in $$levels; do \
		echo "QSF_ISA=$$isa"; export QSF_ISA=$$isa; $(THINNED) \
		$(call c_tests,c,-DQSF_BUILD_LIBRARY=ON); \
		if [ $$isa = scalar ]; then tests="$(SCALAR_TESTS)"; else tests="$(ISA_TESTS)"; fi; \
		$(PY) -m pytest -m "not slow and not golden" $(QUICK_ARGS) $(PYTEST_ARGS) \
			$$(printf 'tests/python/api/test_%s.py ' $$tests); \
	done

check-san: build/test.stamp ## the C tests with address, undefined and thread sanitizers
	@$(THINNED) $(call c_tests,asan,-DQSF_SANITIZE=address$(COMMA)undefined)
	@$(THINNED) $(call c_tests,tsan,-DQSF_SANITIZE=thread)

# All tests on the newest processor that qemu can be; then those whose course depends on the
# instruction set, on processors without SMMLA and without SDOT and with scalar forced.
check-arm: build/test.stamp ## the C tests for 64-bit ARM under qemu, on each level
	@tools/bootstrap.sh arm
	@$(THINNED) export QEMU_CPU=max QSF_CHECK_ISA=i8mm; \
		$(call c_tests,arm,-DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake)
	@$(PY) tools/check_isa_leaks.py build/arm/CMakeFiles/qsf_objects.dir aarch64-linux-gnu-objdump
	@$(THINNED) export QEMU_CPU=cortex-a76 QSF_CHECK_ISA=dotprod; \
		$(call ctest,arm) -R '^check_(isa|model)'
	@$(THINNED) export QEMU_CPU=cortex-a53 QSF_CHECK_ISA=neon; \
		$(call ctest,arm) -R '^check_(isa|kernels|model)'
	@$(THINNED) export QEMU_CPU=max QSF_CHECK_ISA=i8mm QSF_ISA=scalar; \
		$(call ctest,arm) -R '^check_(isa|model)'

check-old: build/test.stamp ## kernels and models on an x86-64 processor without AVX, under qemu
	@tools/bootstrap.sh old
	@$(call c_build,c,-DQSF_BUILD_LIBRARY=ON,qsf)
	@$(THINNED) $(call c_build,old,-DCMAKE_TOOLCHAIN_FILE=cmake/old-x86.cmake \
		-DQSF_OBJECTS=$(CURDIR)/build/c/CMakeFiles/qsf_objects.dir,check_isa check_kernels check_model); \
	$(call ctest,old) -R '^check_(isa|kernels|model$$)'

# Other C libraries and systems, by zig's clang. All tests run on the first; on the second those of
# models, since qemu takes long; the third are built only.
TARGETS_TESTED := x86_64-linux-musl x86_64-windows-gnu
TARGETS_EMULATED := arm-linux-musleabihf riscv64-linux-musl
TARGETS_BUILT := aarch64-linux-musl aarch64-windows-gnu aarch64-macos.11.0 x86_64-macos.10.15
zig = zig=$$($(PY) -c 'import ziglang; print(ziglang.__path__[0])')/zig
zig_flags = -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja -DQSF_ZIG=$$zig \
	-DCMAKE_TOOLCHAIN_FILE=cmake/zig.cmake -DQSF_TARGET=$$target -DQSF_CODECS=$(CURDIR)/build/codecs
check-targets: build/test.stamp ## the C library for musl, 32 bits, RISC-V, Windows, macOS; tests under qemu and wine
	@tools/bootstrap.sh targets
	@$(PY) -m pip install -q ziglang==0.17.1
	@PYTHON=$(PY) tools/fetch_codecs.sh build/codecs
	@$(zig); \
	export WINEPREFIX="$(CURDIR)/build/wine" WINEDEBUG=-all; $(THINNED) \
	for target in $(TARGETS_TESTED); do \
		echo "$$target"; $(call c_tests,$$target,$(zig_flags)); \
	done; \
	for target in $(TARGETS_EMULATED); do \
		echo "$$target"; $(call c_build,$$target,$(zig_flags),$(MODEL_TESTS)); \
		$(call ctest,$$target) -R '^($(subst $(SPACE),|,$(MODEL_TESTS)))$$'; \
	done; \
	for target in $(TARGETS_BUILT); do \
		echo "$$target: built"; \
		$(call c_build,$$target,$(zig_flags) -DQSF_BUILD_LIBRARY=ON,example_generate qsf); \
	done
	@$(MAKE) --no-print-directory program amalgamation build/tiny-llama.qsf
	@export WINEPREFIX="$(CURDIR)/build/wine" WINEDEBUG=-all; for target in $(PROGRAM_TARGETS); do \
		case $$target in *-macos.*|aarch64-windows-gnu) continue ;; x86_64-linux-musl) emulator= ;; \
			*-windows-gnu) emulator=wine ;; *) emulator=qemu-$${target%%-*} ;; esac; \
		tests/install/check_program.sh $(CURDIR)/$(VENV)/bin $$emulator build/$$target/program/qsf*; \
	done
	@$(PY) tools/check_isa_leaks.py build/x86_64-linux-musl/CMakeFiles/qsf_objects.dir
	@rm -rf build/wheels; $(MAKE) --no-print-directory wheels WHEELS=build/wheels
	@$(PY) tools/check_isa_leaks.py build/x86_64-linux-gnu.2.17/CMakeFiles/qsf_objects.dir
	@$(PY) tools/check_isa_leaks.py build/aarch64-linux-gnu.2.17/CMakeFiles/qsf_objects.dir \
		aarch64-linux-gnu-objdump
	@$(call c_build,c,-DQSF_BUILD_LIBRARY=ON,example_generate); $(zig); \
		WINEPREFIX="$(CURDIR)/build/wine" WINEDEBUG=-all tests/install/check_wheels.sh $(PY) build/wheels "$$zig"
	@$(musl_python)
	@$(zig); WINEPREFIX="$(CURDIR)/build/wine" WINEDEBUG=-all tests/install/check_amalgamation.sh "$$zig" \
		build/amalgamation $(TARGETS_TESTED) $(TARGETS_EMULATED) $(TARGETS_BUILT)

windows_python = $(zig); WINEPREFIX="$(CURDIR)/build/wine" tests/install/check_windows_python.sh $(PY) \
	build/wheels/qsf-*-win_amd64.whl build/windows-python "$$zig"
check-windows-python: build/test.stamp ## the wheel for Windows by CPython for Windows in wine: each command
	@$(MAKE) --no-print-directory wheels WHEELS=build/wheels SYSTEMS=win_amd64=x86_64-windows-gnu
	@$(windows_python)

# 70 seconds of a core the first time; needs root and Debian, else it says that it is skipped.
musl_python = tests/install/check_musl_python.sh $(PY) build/wheels/qsf-*-musllinux_1_2_x86_64.whl \
	build/musl-python $(MODEL)
check-musl-python: build/test.stamp ## the wheel for musl by a Python in a root without glibc; MODEL=FILE.gguf runs it too
	@$(MAKE) --no-print-directory wheels WHEELS=build/wheels SYSTEMS=musllinux_1_2_x86_64=x86_64-linux-musl
	@$(musl_python)

PROGRAM_TARGETS := x86_64-linux-musl aarch64-linux-musl arm-linux-musleabihf riscv64-linux-musl \
	x86_64-windows-gnu aarch64-windows-gnu aarch64-macos.11.0 x86_64-macos.10.15
program: build/tools.stamp ## qsf without Python, one file for each system and processor: build/TARGET/program/qsf
	@$(PY) -m pip install -q ziglang==0.17.1
	@PYTHON=$(PY) tools/fetch_codecs.sh build/codecs
	@$(zig); for target in $(PROGRAM_TARGETS); do \
		$(call c_build,$$target,$(zig_flags) -DQSF_BUILD_PROGRAM=ON,qsf_program); \
		! grep -qF "$(CURDIR)" build/$$target/program/qsf* || { echo "build/$$target/program/qsf names" \
			"the folder of its build, so nobody else could build the same" >&2; exit 1; }; \
		ls -l build/$$target/program/qsf* | awk '{ print $$9, $$5, "bytes" }'; \
	done

amalgamation: build/tools.stamp ## the C library as one file: build/amalgamation/qsf.c and qsf.h
	@PYTHON=$(PY) tools/fetch_codecs.sh build/codecs
	@$(PY) tools/amalgamate.py build/codecs build/amalgamation

lint: build/lint.stamp ## ruff, mypy, import-linter, clang-format and the rules of tools/lint_*.py
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy qsf converter/qsf_converter bench/qsf_bench tools/*.py bench/*.py tests/python
	@$(VENV)/bin/lint-imports --no-logo >build/imports.log || { cat build/imports.log; exit 1; }
	@$(CLANG_FORMAT) --dry-run -Werror $(C_FILES)
	@$(PY) tools/lint_c.py
	@$(PY) tools/lint_python.py
	@$(PY) tools/lint_lines.py

format: build/lint.stamp ## let ruff and clang-format rewrite the sources
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .
	@$(CLANG_FORMAT) -i $(C_FILES)

fuzz: build/test.stamp ## each fuzz target for FUZZ_SECONDS, and ten mutants a second (needs clang)
	@$(CMAKE) -S . -B build/fuzz -DCMAKE_C_COMPILER=clang -DQSF_BUILD_FUZZERS=ON >/dev/null
	@$(CMAKE) --build build/fuzz -j $(JOBS)
	@for target in build/fuzz/fuzz_*[a-z]; do \
		name=$${target##*/fuzz_}; mkdir -p build/fuzz/found/$$name; \
		"$$target" -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=1024 \
			-artifact_prefix=build/fuzz/ build/fuzz/found/$$name \
			$$([ -d tests/fuzz/corpus/$$name ] && echo tests/fuzz/corpus/$$name); \
	done
	@QSF_EXAMPLES=$$((10 * $(FUZZ_SECONDS))) $(PY) -m pytest -p no:cacheprovider \
		-k "any_template or any_tokenizer or mutants_give" tests/python/text tests/python/file
	@$(PY) tests/fuzz/check_hostile.py $$((3 * $(FUZZ_SECONDS))) "$$RANDOM"

check-hostile: build/test.stamp ## JSON that takes many times its bytes: VmHWM of each command against its budget
	@$(PY) tests/fuzz/check_hostile.py

baseline: build/install.stamp ## llama.cpp for python -m qsf.bench, built for this processor
	@tools/bootstrap.sh baseline
	@tools/build_baseline.sh $(PY)
	@$(PY) -c 'from qsf_bench.tasks import find_baseline; print(find_baseline())'

# The tag of a wheel = zig's target. One library serves every Python there: see qsf/native/build_ffi.py.
SYSTEMS ?= manylinux_2_17_x86_64=x86_64-linux-gnu.2.17 manylinux_2_17_aarch64=aarch64-linux-gnu.2.17 \
	musllinux_1_2_x86_64=x86_64-linux-musl musllinux_1_2_aarch64=aarch64-linux-musl \
	macosx_11_0_arm64=aarch64-macos.11.0 macosx_10_15_x86_64=x86_64-macos.10.15 \
	win_amd64=x86_64-windows-gnu win_arm64=aarch64-windows-gnu
wheels: build/tools.stamp ## a wheel for each of SYSTEMS, with LZ4 and ZSTD inside, into WHEELS (dist)
	@$(PY) -m pip install -q ziglang==0.17.1
	@PYTHON=$(PY) tools/fetch_codecs.sh build/codecs
	@mkdir -p "$(WHEELS)"; $(zig); for system in $(SYSTEMS); do \
		target=$${system#*=}; define=--config-settings=cmake.define; \
		$(PY) -m pip wheel -q --no-deps --no-build-isolation -w "$(WHEELS)" \
			--config-settings=build-dir=build/$$target \
			--config-settings=wheel.tags=py3-none-$${system%%=*} \
			$$define.CMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/zig.cmake $$define.QSF_TARGET=$$target \
			$$define.QSF_ZIG=$$zig $$define.QSF_CODECS=$(CURDIR)/build/codecs .; \
	done; ls -l "$(WHEELS)"/qsf-*.whl | awk '{ print $$9, $$5, "bytes" }'

release: build/test.stamp ## all of it into dist, built twice and compared: TAG=v1.2.3 URL=HOME, or TRIAL=yes for HEAD
	@$(PY) tools/release.py $(if $(TRIAL),--trial,$(TAG) $(URL))

# From the objects that `make demo` compiled, where they are there.
install: ## the C library into PREFIX (docs/c.md); DESTDIR for packages
	@command -v "$(CMAKE)" >/dev/null || { echo "CMake 3.21 or newer was not found" >&2; exit 1; }
	@folder=build/c; [ -f build/c/build.ninja ] || folder=build/library; mkdir -p $$folder; \
	{ $(CMAKE) -S . -B $$folder -DQSF_BUILD_LIBRARY=ON -DQSF_BUILD_BINDING=OFF \
		-DCMAKE_INSTALL_PREFIX="$(abspath $(PREFIX))" && \
	$(CMAKE) --build $$folder -j $(JOBS) && \
	$(CMAKE) --install $$folder --component library; } >build/install.log 2>&1 || \
		{ cat build/install.log; exit 1; }
	@echo "Installed the C library into $(DESTDIR)$(abspath $(PREFIX))"

clean: ## remove what was built; the environment stays
	rm -rf build dist
