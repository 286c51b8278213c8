// x: any number of values; index: (N,); out: (N,) float32, SCALE times those.

extern "C" __global__ void NAME(const T* x, const int* index, float* out, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = SCALE * static_cast<float>(x[index[i]]);
}
