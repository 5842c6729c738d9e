// PyTorch's current GPU and stream, without CUDA's headers.
#pragma once

struct CUstream_st;
typedef struct CUstream_st *cudaStream_t;

namespace flash {

int current_device();
cudaStream_t current_stream();

}  // namespace flash
