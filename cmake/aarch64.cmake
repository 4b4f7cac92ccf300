# Cross build for 64-bit ARM on Debian or Ubuntu; tests run under qemu.
# Needs gcc-aarch64-linux-gnu, qemu-user, liblz4-dev:arm64 and libzstd-dev:arm64.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
find_program(QSF_QEMU NAMES qemu-aarch64 qemu-aarch64-static REQUIRED)
set(CMAKE_CROSSCOMPILING_EMULATOR ${QSF_QEMU})
# Static: qemu 7.2 can hang in pthread_create() of a program with shared libraries.
# muldefs: check_step_heap brings its own malloc, which a static C library also defines.
set(CMAKE_EXE_LINKER_FLAGS_INIT "-static -Wl,-z,muldefs")
# Headers are shared between architectures.
set(LZ4_INCLUDE_DIR /usr/include CACHE PATH "")
set(ZSTD_INCLUDE_DIR /usr/include CACHE PATH "")
set(LZ4_LIBRARY /usr/lib/aarch64-linux-gnu/liblz4.a CACHE FILEPATH "")
set(ZSTD_LIBRARY /usr/lib/aarch64-linux-gnu/libzstd.a CACHE FILEPATH "")
