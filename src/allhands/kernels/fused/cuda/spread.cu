// x: any number of float32 values; index: (N,); out: (N,) of type T, SCALE times those.

extern "C" __global__ void NAME(const float* x, const int* index, T* out, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = static_cast<T>(SCALE * x[index[i]]);
}
