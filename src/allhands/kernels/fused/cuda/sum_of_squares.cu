// x: (count,); out: (blocks,) float32 sums of squares, each of every blocks-th stretch, with AFTER onto those before.

extern "C" __global__ void NAME(const T* x, const float* before, float* out, int count) {
  constexpr int W = Vec<T>::W;
  float sum = 0.f;
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count / W; i += (size_t)gridDim.x * blockDim.x) {
    Vec<T> q = load<T>(x, i);
    #pragma unroll
    for (int j = 0; j < W; j++) {
      float value = static_cast<float>(q.v[j]);
      sum += value * value;
    }
  }
  __shared__ float sums[8];
  for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0.f;
    for (int k = 0; k < 8; k++) sum += sums[k];
    out[blockIdx.x] = AFTER ? before[blockIdx.x] + sum : sum;
  }
}
