// x: (N, 2 F); c: (N, F) cotangent; out: (N, 2 F); y: (N, F), with AGAIN, what swiglu.cu gives.

extern "C" __global__ void NAME(const T* x, const T* c, T* out, T* y, int rows) {
  constexpr int W = Vec<T>::W;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)rows * (F / W)) return;
  size_t row = i / (F / W), at = row * (2 * F / W) + i % (F / W);
  Vec<T> gate = load<T>(x, at), up = load<T>(x, at + F / W), cot = load<T>(c, i), dgate, dup, value;
  #pragma unroll
  for (int j = 0; j < W; j++) {
    float g = static_cast<float>(gate.v[j]), u = static_cast<float>(up.v[j]), d = static_cast<float>(cot.v[j]);
    float s = logistic(g);
    dup.v[j] = static_cast<T>(d * g * s);
    dgate.v[j] = static_cast<T>(d * u * s * (1.f + g * (1.f - s)));
    if (AGAIN) value.v[j] = static_cast<T>(g * s * u);
  }
  store<T>(out, at, dgate);
  store<T>(out, at + F / W, dup);
  if (AGAIN) store<T>(y, i, value);
}
