// x: (N, 2 F), gate beside up; out: (N, F).

extern "C" __global__ void NAME(const T* x, T* out, int rows) {
  constexpr int W = Vec<T>::W;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)rows * (F / W)) return;
  size_t row = i / (F / W), at = row * (2 * F / W) + i % (F / W);
  Vec<T> gate = load<T>(x, at), up = load<T>(x, at + F / W), y;
  #pragma unroll
  for (int j = 0; j < W; j++) {
    float g = static_cast<float>(gate.v[j]);
    y.v[j] = static_cast<T>(g * logistic(g) * static_cast<float>(up.v[j]));
  }
  store<T>(out, i, y);
}
