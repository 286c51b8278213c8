// x: (B, tokens, H + 2 KV, D), heads of queries, keys and values; out: (B, length, H + 2 KV, D), zeros from ``tokens`` on;
// turns: (tokens or more, D / 2, 2) cosines and sines; rows: B * length. Queries and keys are turned, values copied.

extern "C" __global__ void NAME(const T* x, const float* turns, T* out, int rows, int length, int tokens) {
  constexpr int W = Vec<T>::W, PART = D / 2 / W, HEADS = H + 2 * KV;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)rows * HEADS * PART) return;
  int part = i % PART;
  size_t head = i / PART, row = head / HEADS;
  int place = row % length;
  size_t to = head * (2 * PART) + part;
  Vec<T> a, b;
  if (place < tokens) {
    // Rows before this one lack what they are longer by here.
    size_t from = to - row / length * (length - tokens) * HEADS * (2 * PART);
    a = load<T>(x, from), b = load<T>(x, from + PART);
  } else {
    #pragma unroll
    for (int j = 0; j < W; j++) a.v[j] = b.v[j] = static_cast<T>(0.f);
  }
  if (place < tokens && head % HEADS < H + KV) {
    const float2* turn = reinterpret_cast<const float2*>(turns) + place * (D / 2) + part * W;
    #pragma unroll
    for (int j = 0; j < W; j++) {
      float2 t = turn[j];
      float u = static_cast<float>(a.v[j]), v = static_cast<float>(b.v[j]);
      a.v[j] = static_cast<T>(u * t.x - v * t.y);
      b.v[j] = static_cast<T>(v * t.x + u * t.y);
    }
  }
  store<T>(out, to, a);
  store<T>(out, to + PART, b);
}
