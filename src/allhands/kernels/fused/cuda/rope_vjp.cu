// q: (B, length, H, D), k and v: (B, length, KV, D) cotangents, of which the first ``tokens`` places count;
// out: (B, tokens, H + 2 KV, D), turned back; rows: B * tokens.

extern "C" __global__ void NAME(const T* q, const T* k, const T* v, const float* turns, T* out, int rows, int length, int tokens) {
  constexpr int W = Vec<T>::W, PART = D / 2 / W, HEADS = H + 2 * KV;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)rows * HEADS * PART) return;
  int part = i % PART;
  size_t at = i / PART;
  int head = at % HEADS;
  size_t row = at / HEADS;
  int place = row % tokens;
  size_t there = row / tokens * length + place;
  const T* from = head < H ? q + (there * H + head) * D
      : head < H + KV      ? k + (there * KV + head - H) * D
                           : v + (there * KV + head - H - KV) * D;
  Vec<T> a = load<T>(from, part), b = load<T>(from, part + PART);
  if (head < H + KV) {
    const float2* turn = reinterpret_cast<const float2*>(turns) + place * (D / 2) + part * W;
    #pragma unroll
    for (int j = 0; j < W; j++) {
      float2 t = turn[j];
      float u = static_cast<float>(a.v[j]), v = static_cast<float>(b.v[j]);
      a.v[j] = static_cast<T>(u * t.x + v * t.y);
      b.v[j] = static_cast<T>(v * t.x - u * t.y);
    }
  }
  store<T>(out, at * (2 * PART) + part, a);
  store<T>(out, at * (2 * PART) + part + PART, b);
}
