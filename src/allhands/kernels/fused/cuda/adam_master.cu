// As in adam.cu, for a weight that has a float32 copy, w, which is updated, as are its float32 moments;
// rounded: (count,) the new weight in its own type.

extern "C" __global__ void NAME(
    const T* g, const float* w, const float* m, const float* v, const float* s,
    T* rounded, float* new_w, float* new_m, float* new_v, int count) {
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count / 4) return;
  Vec<float> weight = load<float>(w, i), first = load<float>(m, i), second = load<float>(v, i);
  Quad<T> gradient = quad(g, i), out;
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    if (s[1] != 0.f) {
      float d = static_cast<float>(gradient.v[j]) * s[0];
      float a = s[3] * first.v[j] + s[8] * d;
      float b = s[4] * second.v[j] + s[9] * d * d;
      first.v[j] = a;
      second.v[j] = b;
      weight.v[j] = weight.v[j] * s[6] - __fdividef(s[2] * a, __fsqrt_rn(b) * s[7] + s[5]);
    }
    out.v[j] = static_cast<T>(weight.v[j]);
  }
  reinterpret_cast<Quad<T>*>(rounded)[i] = out;
  store<float>(new_w, i, weight);
  store<float>(new_m, i, first);
  store<float>(new_v, i, second);
}
