# The C library as it is installed: libqsf.so and libqsf.a, qsf.h, and what tells pkg-config and
# CMake how to use them. Included by CMakeLists.txt for QSF_BUILD_LIBRARY.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Before 1.0.0 a minor version may change structs: it is part of the name that programs ask for.
set(QSF_SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
add_library(qsf SHARED $<TARGET_OBJECTS:qsf_objects>)
set_target_properties(qsf PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${QSF_SOVERSION})
target_link_libraries(qsf PRIVATE Threads::Threads ${LZ4_LIBRARY} ${ZSTD_LIBRARY} m)
if(UNIX AND NOT APPLE)
  target_link_options(qsf PRIVATE -Wl,--no-undefined)
endif()
if(WIN32) # which exports all names or those of a list
  file(GLOB headers ${PROJECT_SOURCE_DIR}/csrc/include/*.h)
  set(exports "EXPORTS\n")
  foreach(header ${headers} ${PROJECT_SOURCE_DIR}/csrc/stream/contents.h)
    file(STRINGS ${header} lines REGEX "^QSF_API .*[ *]qsf_[a-z0-9_]+\\(")
    foreach(line ${lines})
      string(REGEX REPLACE "^[^(]*[ *](qsf_[a-z0-9_]+)\\(.*" "\\1\n" name "${line}")
      string(APPEND exports ${name})
    endforeach()
  endforeach()
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/qsf.def CONTENT "${exports}")
  target_sources(qsf PRIVATE ${PROJECT_BINARY_DIR}/qsf.def)
endif()
if(QSF_CODECS) # without the parts of LZ4 and ZSTD that nobody calls
  target_link_options(qsf PRIVATE ${QSF_STRIPPED})
endif()

install(TARGETS qsf qsf_core EXPORT qsf COMPONENT library
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/csrc/include/
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library FILES_MATCHING PATTERN "*.h")

set(QSF_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/qsf)
install(EXPORT qsf NAMESPACE qsf:: FILE qsfTargets.cmake
        DESTINATION ${QSF_PACKAGE_DIR} COMPONENT library)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/qsfConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/qsfConfig.cmake
                              INSTALL_DESTINATION ${QSF_PACKAGE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/qsfConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/qsfConfig.cmake ${PROJECT_BINARY_DIR}/qsfConfigVersion.cmake
        DESTINATION ${QSF_PACKAGE_DIR} COMPONENT library)

# Written when it is installed, because `cmake --install --prefix` may choose another prefix.
install(CODE "set(CMAKE_INSTALL_LIBDIR \"${CMAKE_INSTALL_LIBDIR}\")
set(CMAKE_INSTALL_INCLUDEDIR \"${CMAKE_INSTALL_INCLUDEDIR}\")
set(PROJECT_VERSION \"${PROJECT_VERSION}\")
configure_file(\"${PROJECT_SOURCE_DIR}/cmake/qsf.pc.in\" \"${PROJECT_BINARY_DIR}/qsf.pc\" @ONLY)"
        COMPONENT library)
install(FILES ${PROJECT_BINARY_DIR}/qsf.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT library)
