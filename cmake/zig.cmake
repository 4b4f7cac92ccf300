# Cross build by zig's clang, which brings the C library of each system: -DQSF_TARGET=, such as
# x86_64-linux-musl or x86_64-windows-gnu; -DQSF_ZIG= its program. LZ4 and ZSTD are built from the
# sources in QSF_CODECS (tools/fetch_codecs.sh). Tests of another processor run under qemu, those
# for Windows under wine.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES QSF_TARGET QSF_ZIG)
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "${QSF_TARGET}")
if(QSF_TARGET MATCHES "-windows")
  set(CMAKE_SYSTEM_NAME Windows)
elseif(QSF_TARGET MATCHES "-macos")
  set(CMAKE_SYSTEM_NAME Darwin)
else()
  set(CMAKE_SYSTEM_NAME Linux)
endif()

set(CMAKE_C_COMPILER ${QSF_ZIG} cc)
set(CMAKE_C_COMPILER_TARGET ${QSF_TARGET})
set(CMAKE_C_COMPILER_AR ${QSF_ZIG})
foreach(rule ARCHIVE_CREATE ARCHIVE_APPEND)
  set(CMAKE_C_${rule} "\"${QSF_ZIG}\" ar qc <TARGET> <LINK_FLAGS> <OBJECTS>")
endforeach()
set(CMAKE_C_ARCHIVE_FINISH "\"${QSF_ZIG}\" ranlib <TARGET>")
# What runs on a processor of the target's baseline.
set(CMAKE_C_FLAGS_INIT "-mcpu=baseline")
if(QSF_TARGET MATCHES "-musl")
  set(CMAKE_EXE_LINKER_FLAGS_INIT "-static") # runs without the target's libraries
endif()

# Where gcc can, it compiles, with zig's headers of that glibc, and zig links: by clang, passes of 4 to
# 8 tokens take up to 1.7 times as long with AVX-512.
if(CMAKE_HOST_SYSTEM_PROCESSOR STREQUAL "x86_64" AND QSF_TARGET MATCHES "^x86_64-linux-gnu\\.2\\.([0-9]+)$")
  set(glibc ${CMAKE_MATCH_1})
  set(CMAKE_C_COMPILER gcc)
  execute_process(COMMAND gcc -print-file-name=include OUTPUT_VARIABLE include
                  OUTPUT_STRIP_TRAILING_WHITESPACE)
  get_filename_component(headers "${QSF_ZIG}" DIRECTORY)
  set(CMAKE_C_FLAGS_INIT "-nostdinc -D__GLIBC_MINOR__=${glibc} -isystem ${include}")
  foreach(folder x86-linux-gnu generic-glibc x86-linux-any any-linux-any)
    string(APPEND CMAKE_C_FLAGS_INIT " -isystem ${headers}/lib/libc/include/${folder}")
  endforeach()
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
  set(CMAKE_C_CREATE_SHARED_LIBRARY "\"${QSF_ZIG}\" cc --target=${QSF_TARGET} -shared <LINK_FLAGS> \
<SONAME_FLAG><TARGET_SONAME> -o <TARGET> <OBJECTS> <LINK_LIBRARIES>")
endif()

if(QSF_TARGET MATCHES "-windows")
  find_program(QSF_EMULATOR NAMES wine)
elseif(QSF_TARGET MATCHES "-linux" AND NOT CMAKE_SYSTEM_PROCESSOR STREQUAL CMAKE_HOST_SYSTEM_PROCESSOR)
  find_program(QSF_EMULATOR NAMES qemu-${CMAKE_SYSTEM_PROCESSOR})
endif()
if(QSF_EMULATOR)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${QSF_EMULATOR})
endif()
