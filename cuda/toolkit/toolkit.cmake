# The cuda backend in the binary: kernels by nvcc, everything else by the C++ compiler. NVIDIA's libraries are loaded at run time;
# only the runtime's launcher (libcudart_static, which loads the driver itself) is linked.
set(DSPARK_CUDA_HOME "" CACHE PATH "a CUDA 13 toolkit; third_party/fetch_cuda.sh prints one")
set(DSPARK_CUDA_ARCHITECTURES "80;90;100;103" CACHE STRING "architectures to compile for; PTX of the last one goes with them")

find_program(DS_NVCC nvcc HINTS ${DSPARK_CUDA_HOME}/bin /usr/local/cuda/bin)
if(NOT DS_NVCC)
  if(DSPARK_CUDA STREQUAL "ON")
    message(FATAL_ERROR "DSPARK_CUDA=ON, but there is no nvcc: set DSPARK_CUDA_HOME to a CUDA 13 toolkit (third_party/fetch_cuda.sh gets one)")
  endif()
  message(STATUS "no nvcc: the binary has no cuda backend")
  return()
endif()
get_filename_component(DS_CUDA_HOME ${DS_NVCC} REALPATH)
get_filename_component(DS_CUDA_HOME ${DS_CUDA_HOME}/../.. ABSOLUTE)
find_library(DS_CUDART NAMES libcudart_static.a PATHS ${DS_CUDA_HOME}/lib64 ${DS_CUDA_HOME}/lib ${DS_CUDA_HOME}/targets/x86_64-linux/lib ${DS_CUDA_HOME}/targets/sbsa-linux/lib NO_DEFAULT_PATH REQUIRED)

set(DS_NVCC_FLAGS -std=c++20 -O3 --expt-relaxed-constexpr -Werror all-warnings -Xptxas -v -Xcompiler=-Wall,-Wextra,-Werror,-Wno-unused-parameter
    -I${CMAKE_SOURCE_DIR} -I${CMAKE_SOURCE_DIR}/lib)
foreach(arch ${DSPARK_CUDA_ARCHITECTURES})
  list(APPEND DS_NVCC_FLAGS -gencode arch=compute_${arch},code=sm_${arch})
  set(DS_LAST_ARCH ${arch})
endforeach()
list(APPEND DS_NVCC_FLAGS -gencode arch=compute_${DS_LAST_ARCH},code=compute_${DS_LAST_ARCH})

file(GLOB DS_KERNELS CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/cuda/*.cu)
if(EXISTS ${DS_CUDA_HOME}/include/cublasLt.h)
  list(APPEND DS_KERNELS ${CMAKE_SOURCE_DIR}/cuda/toolkit/abi_check.cu)
endif()
set(DS_KERNEL_OBJECTS)
foreach(source ${DS_KERNELS})
  get_filename_component(name ${source} NAME_WE)
  set(object ${CMAKE_BINARY_DIR}/kernels/${name}.o)
  # What ptxas says goes to a log, which the report reads; it is shown when the compilation fails.
  add_custom_command(OUTPUT ${object} BYPRODUCTS ${object}.log
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/kernels
    COMMAND sh -c "\"$@\" > '${object}.log' 2>&1 || { cat '${object}.log'; exit 1; }" nvcc
            ${DS_NVCC} ${DS_NVCC_FLAGS} -MD -MT ${object} -MF ${object}.d -c ${source} -o ${object}
    DEPENDS ${source} DEPFILE ${object}.d COMMENT "Compiling kernels ${name}.cu" VERBATIM)
  list(APPEND DS_KERNEL_OBJECTS ${object})
endforeach()

file(GLOB DS_CUDA_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/cuda/*.cc ${CMAKE_SOURCE_DIR}/cuda/toolkit/*.cc)
target_sources(dspark PRIVATE ${DS_CUDA_SOURCES} ${DS_KERNEL_OBJECTS})
set_source_files_properties(${DS_KERNEL_OBJECTS} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
target_include_directories(dspark PRIVATE ${CMAKE_SOURCE_DIR})
target_link_libraries(dspark PRIVATE ${DS_CUDART} ${CMAKE_DL_LIBS} rt)
add_custom_target(cuda_report COMMAND python3 ${CMAKE_SOURCE_DIR}/cuda/toolkit/report.py ${CMAKE_BINARY_DIR}/kernels DEPENDS ${DS_KERNEL_OBJECTS} VERBATIM)
