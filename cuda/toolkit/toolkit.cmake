# The cuda backend compiled for real: kernels by nvcc, everything else by the C++ compiler. NVIDIA's libraries are loaded at run
# time; only the runtime's launcher (libcudart_static, which loads the driver itself) is linked.
#
#   ds_cuda_kernels(ARCHITECTURES 80 90 PTX)   compiles them once: code for these, and PTX of the last one
#   ds_cuda_backend(TARGET)                    adds the backend to an executable
set(DSPARK_CUDA_HOME "" CACHE PATH "a CUDA 13 toolkit; third_party/fetch_cuda.sh prints one")
set(DSPARK_CUDA_ARCHITECTURES "80;90;100;103" CACHE STRING "architectures to compile for; PTX of the last one goes with them")

find_program(DS_NVCC nvcc HINTS ${DSPARK_CUDA_HOME}/bin /usr/local/cuda/bin)
set(DS_NVCC_FOUND OFF)
set(DS_NVCC_ABSENT "no nvcc")
if(CMAKE_CROSSCOMPILING)
  set(DS_NVCC_ABSENT "no nvcc for another processor")
elseif(DS_NVCC)
  execute_process(COMMAND ${DS_NVCC} --version OUTPUT_VARIABLE version ERROR_QUIET)
  if(version MATCHES "release ([0-9]+)\\.[0-9]+" AND CMAKE_MATCH_1 GREATER_EQUAL 13)
    set(DS_NVCC_FOUND ON)
  else()
    set(DS_NVCC_ABSENT "${DS_NVCC} is not CUDA 13's")
  endif()
endif()

function(ds_cuda_kernels)
  cmake_parse_arguments(ARG "PTX" "" "ARCHITECTURES" ${ARGN})
  get_filename_component(home ${DS_NVCC} REALPATH)
  get_filename_component(home ${home}/../.. ABSOLUTE)
  find_library(DS_CUDART NAMES libcudart_static.a PATHS ${home}/lib64 ${home}/lib ${home}/targets/x86_64-linux/lib ${home}/targets/sbsa-linux/lib NO_DEFAULT_PATH REQUIRED)
  set(flags -std=c++20 -O3 --expt-relaxed-constexpr -Werror all-warnings -Xptxas -v -Xcompiler=-Wall,-Wextra,-Werror,-Wno-unused-parameter
      -I${CMAKE_SOURCE_DIR} -I${CMAKE_SOURCE_DIR}/lib)
  foreach(arch ${ARG_ARCHITECTURES})
    list(APPEND flags -gencode arch=compute_${arch},code=sm_${arch})
  endforeach()
  if(ARG_PTX)
    list(GET ARG_ARCHITECTURES -1 last)
    list(APPEND flags -gencode arch=compute_${last},code=compute_${last})
  endif()

  file(GLOB kernels CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/cuda/*.cu)
  if(EXISTS ${home}/include/cublasLt.h)
    list(APPEND kernels ${CMAKE_SOURCE_DIR}/cuda/toolkit/abi_check.cu)
  endif()
  set(compiler ${DS_NVCC})
  if(CCACHE)
    set(compiler ${CCACHE} ${DS_NVCC})
  endif()
  set(objects)
  foreach(source ${kernels})
    get_filename_component(name ${source} NAME_WE)
    set(object ${CMAKE_BINARY_DIR}/kernels/${name}.o)
    # What ptxas says goes to a log, which the report reads; it is shown when the compilation fails.
    add_custom_command(OUTPUT ${object} BYPRODUCTS ${object}.log
      COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/kernels
      COMMAND sh -c "\"$@\" > '${object}.log' 2>&1 || { cat '${object}.log'; exit 1; }" nvcc
              ${compiler} ${flags} -MD -MT ${object} -MF ${object}.d -c ${source} -o ${object}
      DEPENDS ${source} DEPFILE ${object}.d COMMENT "Compiling kernels ${name}.cu" VERBATIM)
    list(APPEND objects ${object})
  endforeach()
  set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)

  add_custom_target(cuda_kernels DEPENDS ${objects})
  add_custom_target(cuda_report COMMAND python3 ${CMAKE_SOURCE_DIR}/cuda/toolkit/report.py ${CMAKE_BINARY_DIR}/kernels DEPENDS ${objects} VERBATIM)
  set(DS_KERNEL_OBJECTS ${objects} PARENT_SCOPE)

  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/cuda/*.cc ${CMAKE_SOURCE_DIR}/cuda/toolkit/*.cc)
  add_library(ds_cuda_host OBJECT ${sources})  # objects: register.cc must not be left out
  target_link_libraries(ds_cuda_host PUBLIC ds_model ds_net ${DS_CUDART} ${CMAKE_DL_LIBS} rt)
  target_include_directories(ds_cuda_host PUBLIC ${CMAKE_SOURCE_DIR})
endfunction()

function(ds_cuda_backend target)
  target_sources(${target} PRIVATE ${DS_KERNEL_OBJECTS})
  target_link_libraries(${target} PRIVATE ds_cuda_host)
  add_dependencies(${target} cuda_kernels)
endfunction()
