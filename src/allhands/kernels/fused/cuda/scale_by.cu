// x, out: (count,), whole vectors of them; factor: (1,) float32.

extern "C" __global__ void NAME(const T* x, const float* factor, T* out, int count) {
  constexpr int W = Vec<T>::W;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count / W) return;
  Vec<T> v = load<T>(x, i);
  #pragma unroll
  for (int j = 0; j < W; j++) v.v[j] = static_cast<T>(static_cast<float>(v.v[j]) * *factor);
  store<T>(out, i, v);
}
