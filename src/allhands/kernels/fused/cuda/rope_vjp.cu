// q: (B, length, H, D), k and v: (B, length, KV, D) cotangents, of which the first ``tokens`` places count;
// out: (B, tokens, H + 2 KV, D), turned back; rows: B * tokens. With NORMED also through the norms of queries and keys:
// x: (B, tokens, H + 2 KV, D), their input; wq, wk: (D,).

extern "C" __global__ void NAME(
    const T* q, const T* k, const T* v, const float* turns, const T* x, const T* wq, const T* wk, T* out, int rows,
    int length, int tokens) {
  constexpr int W = Vec<T>::W, PART = D / 2 / W, HEADS = H + 2 * KV;
  const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, last = (size_t)rows * HEADS * PART - 1;
  if (!NORMED && i > last) return;
  // A sum over a head is one of a whole warp, so that threads beyond the end go with the others.
  const size_t mine = i > last ? last : i;
  const int part = mine % PART;
  const size_t at = mine / PART, row = at / HEADS, to = at * (2 * PART) + part;
  const int head = at % HEADS, place = row % tokens;
  const size_t there = row / tokens * length + place;
  const T* from = head < H ? q + (there * H + head) * D
      : head < H + KV      ? k + (there * KV + head - H) * D
                           : v + (there * KV + head - H - KV) * D;
  Vec<T> a = load<T>(from, part), b = load<T>(from, part + PART);
  const bool turned = head < H + KV;
  float first[W], second[W];
  if (turned) {
    const float2* turn = reinterpret_cast<const float2*>(turns) + place * (D / 2) + part * W;
    #pragma unroll
    for (int j = 0; j < W; j++) {
      float2 t = turn[j];
      const float u = static_cast<float>(a.v[j]), w = static_cast<float>(b.v[j]);
      first[j] = u * t.x + w * t.y;
      second[j] = w * t.x - u * t.y;
    }
  }
  if (NORMED) {
    const T* weights = head < H ? wq : wk;
    const Vec<T> wa = load<T>(weights, part), wb = load<T>(weights, part + PART);
    const Vec<T> xa = load<T>(x, to), xb = load<T>(x, to + PART);
    float square = 0.f, product = 0.f;
    #pragma unroll
    for (int j = 0; j < W; j++) {
      const float u = static_cast<float>(xa.v[j]), w = static_cast<float>(xb.v[j]);
      first[j] = turned ? first[j] * static_cast<float>(wa.v[j]) : 0.f;
      second[j] = turned ? second[j] * static_cast<float>(wb.v[j]) : 0.f;
      square += u * u + w * w;
      product += u * first[j] + w * second[j];
    }
    square = lanes_sum<PART>(square);
    product = lanes_sum<PART>(product);
    const float n = rsqrtf(square / D + EPS), pull = product * n * n * n / D;
    #pragma unroll
    for (int j = 0; j < W; j++) {
      first[j] = n * first[j] - pull * static_cast<float>(xa.v[j]);
      second[j] = n * second[j] - pull * static_cast<float>(xb.v[j]);
    }
  }
  if (i > last) return;
  if (turned) {
    #pragma unroll
    for (int j = 0; j < W; j++) a.v[j] = static_cast<T>(first[j]), b.v[j] = static_cast<T>(second[j]);
  }
  store<T>(out, to, a);
  store<T>(out, to + PART, b);
}
