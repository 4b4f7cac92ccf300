# Read by ctest: one test for each group that check_kernels says it has, so that they run side by
# side and none can be forgotten. CMakeLists.txt sets `program` and `emulator`, which is empty or
# what runs programs of another processor.
if(NOT EXISTS "${program}")
  add_test(check_kernels_is_not_built "${program}")
  return()
endif()
execute_process(COMMAND ${emulator} "${program}" --list
                OUTPUT_VARIABLE groups RESULT_VARIABLE result)
string(REGEX MATCHALL "[a-z0-9_]+" groups "${groups}")
if(NOT result EQUAL 0 OR NOT groups)
  add_test(check_kernels_lists_nothing ${emulator} "${program}" --list nothing)
endif()
foreach(group IN LISTS groups)
  add_test(check_kernels_${group} ${emulator} "${program}" --only ${group})
  if(group MATCHES "^matmul")
    set_tests_properties(check_kernels_${group} PROPERTIES COST 200)
  endif()
endforeach()
