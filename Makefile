# For people: `make`, `make demo`, `make test`. CMake does the work; see README.md.
SHELL := /bin/bash
BUILD ?= build
PREFIX ?= /usr/local
JOBS ?= $(shell nproc)
CMAKE_FLAGS ?=
TEST_SECONDS ?= 2400
PACKAGES := g++ cmake ninja-build pkg-config ccache libcli11-dev libfmt-dev libzstd-dev nlohmann-json3-dev libpcre2-dev \
            libutf8proc-dev zlib1g-dev libboost1.81-dev libboost-context1.81-dev libssl-dev catch2 python3 python3-pip
ARM64_PACKAGES := g++-aarch64-linux-gnu qemu-user libzstd-dev:arm64 libpcre2-dev:arm64 libutf8proc-dev:arm64 zlib1g-dev:arm64 libboost-context1.81-dev:arm64 libssl-dev:arm64

.PHONY: all build deps model test test-gpu test-peers bench-peers demo install clean format asan tsan static arm64 cuda

all: build

# Whether package $$p is installed for architecture $(1): `dpkg -s` fails on a name that two architectures have.
installed = dpkg-query -W -f '$${Architecture} $${db:Status-Status}\n' $$p 2>/dev/null | grep -Eq "^(all|$(1)) installed"

# Installs what is missing, as root or with sudo; elsewhere says exactly what to install.
deps:
	@missing=""; for p in $(PACKAGES); do $(call installed,$$(dpkg --print-architecture)) || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ]; then \
	  if ! command -v apt-get >/dev/null; then echo "Install the equivalents of:$$missing" >&2; exit 1; fi; \
	  if [ "$$(id -u)" = 0 ]; then sudo=""; elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then sudo=sudo; \
	  else echo "Not root and no sudo. Please run: apt-get install$$missing" >&2; exit 1; fi; \
	  echo "installing$$missing"; \
	  $$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi

build: deps
	@cmake -S . -B $(BUILD) -G Ninja -DCMAKE_BUILD_TYPE=Release $(CMAKE_FLAGS) >/dev/null
	@cmake --build $(BUILD) -j $(JOBS)

# SmolLM2-135M-Instruct, for the demo and the tests that use a real model.
model: deps
	@third_party/fetch_model.sh

test: build model
	@cd $(BUILD) && ctest --output-on-failure --timeout $(TEST_SECONDS)

# Packed drafters in the real speculators: a Python environment in the cache folder (3 GB from PyPI, 6 GB on disk), made by the first run.
test-peers: build model
	@cache="$$(tests/peers/setup.sh)" && "$$cache/venv/bin/python" tests/peers/check.py --dspark $(BUILD)/dspark \
	  --tests $(BUILD)/dspark_tests --target "$$(third_party/fetch_model.sh)" --cache "$$cache" --out $(BUILD)/peers

# One training step of dspark and of speculators, in turns, on the same shapes: `make bench-peers FLAGS="--shapes small"`.
bench-peers: build
	@cache="$$(tests/peers/setup.sh)" && "$$cache/venv/bin/python" tests/peers/bench.py --dspark $(BUILD)/dspark $(FLAGS)

demo: build model
	@python3 tests/demo/demo.py --dspark $(BUILD)/dspark --target "$$(third_party/fetch_model.sh)" --out $(BUILD)/demo

install: build
	@cmake --install $(BUILD) --prefix $(PREFIX)

clean:
	rm -rf $(BUILD) build-asan build-tsan build-static build-arm64 build-cuda

format:
	@git ls-files '*.h' '*.cc' '*.cu' | xargs clang-format -i

asan:
	@$(MAKE) test BUILD=build-asan TEST_SECONDS=7200 CMAKE_FLAGS="-DDSPARK_SANITIZE=address,undefined"

tsan:
	@$(MAKE) test BUILD=build-tsan TEST_SECONDS=7200 CMAKE_FLAGS="-DDSPARK_SANITIZE=thread"

static:
	@$(MAKE) build BUILD=build-static CMAKE_FLAGS="-DDSPARK_STATIC=ON -DDSPARK_TESTS=OFF"

# With the cuda backend, for sm_80, sm_90, sm_100, sm_103 and PTX; prints registers and spills per kernel. Gets a CUDA 13 compiler
# from PyPI where there is none.
cuda: deps
	@home="$$(third_party/fetch_cuda.sh)" && $(MAKE) --no-print-directory build BUILD=build-cuda CMAKE_FLAGS="-DDSPARK_CUDA=ON -DDSPARK_CUDA_HOME=$$home -DDSPARK_TESTS=OFF"
	@cmake --build build-cuda --target cuda_report

# On a machine with a GPU: the operators, the public trainers' steps and trajectories on it; then the operators again under each tool of
# compute-sanitizer, where there is one. `build-cuda/dspark bench all --device cuda` measures.
test-gpu: deps
	@home="$$(third_party/fetch_cuda.sh)" && cmake -S . -B build-cuda -G Ninja -DCMAKE_BUILD_TYPE=Release -DDSPARK_CUDA=ON -DDSPARK_CUDA_HOME=$$home -DDSPARK_TESTS=ON >/dev/null && \
	cmake --build build-cuda -j $(JOBS) --target dspark dspark_device_tests && build-cuda/dspark_device_tests && \
	if sanitizer="$$(PATH="$$PATH:$$home/bin" command -v compute-sanitizer)"; then \
	  for tool in memcheck racecheck initcheck synccheck; do echo "$$tool"; "$$sanitizer" --tool $$tool --error-exitcode 1 build-cuda/dspark_device_tests "[ops]" || exit 1; done; \
	else echo "no compute-sanitizer here: left out"; fi

# For 64-bit ARM with Debian's cross compiler; static, since programs that load libraries hang at their first thread under the emulator
# of Debian 12. `qemu-aarch64 build-arm64/dspark_tests` runs the tests.
arm64: deps
	@if ! dpkg-query -W -f '$${db:Status-Status}\n' $(ARM64_PACKAGES) 2>/dev/null | awk '{n += $$0 == "installed"} END {exit n != $(words $(ARM64_PACKAGES))}'; then \
	  if [ "$$(id -u)" = 0 ]; then sudo=""; else sudo=sudo; fi; \
	  echo "installing $(ARM64_PACKAGES)"; \
	  $$sudo dpkg --add-architecture arm64 && $$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq --no-install-recommends $(ARM64_PACKAGES) >/dev/null; fi
	@$(MAKE) build BUILD=build-arm64 CMAKE_FLAGS="-DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/third_party/aarch64.cmake -DDSPARK_STATIC=ON"
