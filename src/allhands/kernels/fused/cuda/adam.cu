// g, w, m, v: (count,) gradient, weight and moments; s: (10,) float32: factor of the gradient, whether to update at all,
// learning rate, both betas, epsilon, factor of the weight, factor of the root, and what both betas lack to one, since
// 0.001 is not what float32 makes of 1 - 0.999.

extern "C" __global__ void NAME(
    const T* g, const T* w, const T* m, const T* v, const float* s, T* new_w, T* new_m, T* new_v, int count) {
  constexpr int W = Vec<T>::W;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count / W) return;
  Vec<T> weight = load<T>(w, i), first = load<T>(m, i), second = load<T>(v, i), gradient = load<T>(g, i);
  if (s[1] != 0.f) {
    #pragma unroll
    for (int j = 0; j < W; j++) {
      float d = static_cast<float>(gradient.v[j]) * s[0];
      float a = s[3] * static_cast<float>(first.v[j]) + s[8] * d;
      float b = s[4] * static_cast<float>(second.v[j]) + s[9] * d * d;
      first.v[j] = static_cast<T>(a);
      second.v[j] = static_cast<T>(b);
      weight.v[j] = static_cast<T>(
          static_cast<float>(weight.v[j]) * s[6] - __fdividef(s[2] * a, __fsqrt_rn(b) * s[7] + s[5]));
    }
  }
  store<T>(new_w, i, weight);
  store<T>(new_m, i, first);
  store<T>(new_v, i, second);
}
