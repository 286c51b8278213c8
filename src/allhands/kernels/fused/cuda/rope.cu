// x: (B, tokens, H + 2 KV, D), heads of queries, keys and values; out: (B, length, H + 2 KV, D), zeros from ``tokens`` on;
// turns: (tokens or more, D / 2, 2) cosines and sines; rows: B * length. Queries and keys are turned, values copied. With
// NORMED each head of queries and of keys is normed before: wq, wk: (D,).

extern "C" __global__ void NAME(
    const T* x, const float* turns, const T* wq, const T* wk, T* out, int rows, int length, int tokens) {
  constexpr int W = Vec<T>::W, PART = D / 2 / W, HEADS = H + 2 * KV;
  const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, last = (size_t)rows * HEADS * PART - 1;
  if (!NORMED && i > last) return;
  // A sum over a head is one of a whole warp, so that threads beyond the end go with the others.
  const size_t mine = i > last ? last : i;
  const int part = mine % PART;
  const size_t head = mine / PART, row = head / HEADS, to = head * (2 * PART) + part;
  const int place = row % length;
  const bool turned = head % HEADS < H + KV;
  Vec<T> a, b;
  if (place < tokens) {
    // Rows before this one lack what they are longer by here.
    const size_t from = to - row / length * (length - tokens) * HEADS * (2 * PART);
    a = load<T>(x, from), b = load<T>(x, from + PART);
  } else {
    #pragma unroll
    for (int j = 0; j < W; j++) a.v[j] = b.v[j] = static_cast<T>(0.f);
  }
  float first[W], second[W];
  #pragma unroll
  for (int j = 0; j < W; j++) first[j] = static_cast<float>(a.v[j]), second[j] = static_cast<float>(b.v[j]);
  if (NORMED) {
    float square = 0.f;
    #pragma unroll
    for (int j = 0; j < W; j++) square += first[j] * first[j] + second[j] * second[j];
    const float n = rsqrtf(lanes_sum<PART>(square) / D + EPS);
    const T* weights = head % HEADS < H ? wq : wk;
    const Vec<T> wa = load<T>(weights, part), wb = load<T>(weights, part + PART);
    #pragma unroll
    for (int j = 0; j < W; j++) {
      first[j] *= n * static_cast<float>(wa.v[j]);
      second[j] *= n * static_cast<float>(wb.v[j]);
    }
  }
  if (place < tokens && turned) {
    const float2* turn = reinterpret_cast<const float2*>(turns) + place * (D / 2) + part * W;
    #pragma unroll
    for (int j = 0; j < W; j++) {
      float2 t = turn[j];
      a.v[j] = static_cast<T>(first[j] * t.x - second[j] * t.y);
      b.v[j] = static_cast<T>(second[j] * t.x + first[j] * t.y);
    }
  }
  if (i > last) return;
  store<T>(out, to, a);
  store<T>(out, to + PART, b);
}
