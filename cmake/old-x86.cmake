# The C tests for an x86-64 processor that ends at SSE4.2, which qemu imitates.
# Needs qemu-user and the static libraries of liblz4-dev and libzstd-dev.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
find_program(QSF_QEMU NAMES qemu-x86_64 qemu-x86_64-static REQUIRED)
set(CMAKE_CROSSCOMPILING_EMULATOR ${QSF_QEMU} -cpu Nehalem)
# Static and muldefs for the reasons that aarch64.cmake gives.
set(CMAKE_EXE_LINKER_FLAGS_INIT "-static -Wl,-z,muldefs")
find_library(LZ4_LIBRARY NAMES liblz4.a HINTS /usr/lib/x86_64-linux-gnu /usr/lib64 REQUIRED)
find_library(ZSTD_LIBRARY NAMES libzstd.a HINTS /usr/lib/x86_64-linux-gnu /usr/lib64 REQUIRED)
