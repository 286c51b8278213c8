// ids: (N,), none negative; order: (N,) places of the ids in order, equal ones as they come; g: (N, D); out: (V, D)
// sums of the rows of each id, added in float32 from the first to the last, by the block at the first place of an id.

extern "C" __global__ void NAME(
    const int* ids, const uint32* order, const T* g, const T* onto, T* out, int count) {
  if (ONTO) out = const_cast<T*>(onto);
  constexpr int W = Vec<T>::W, PARTS = D / W, CHUNKS = (PARTS + THREADS - 1) / THREADS, AHEAD = 4;
  const int place = blockIdx.x / CHUNKS, part = (blockIdx.x % CHUNKS) * THREADS + threadIdx.x;
  const int id = ids[order[place]];
  if (part >= PARTS || (place > 0 && ids[order[place - 1]] == id)) return;
  float total[W];
  #pragma unroll
  for (int j = 0; j < W; j++) total[j] = 0.f;
  bool mine = true;
  for (int at = place; mine; at += AHEAD) {
    // Rows are read before it is known whether they count, since one after the other they would be waited for.
    Vec<T> rows[AHEAD];
    bool counts[AHEAD];
    #pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      const uint32 row = order[at + k < count ? at + k : place];
      counts[k] = at + k < count && ids[row] == id;
      rows[k] = load<T>(g, (size_t)row * PARTS + part);
    }
    #pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      mine = mine && counts[k];
      #pragma unroll
      for (int j = 0; j < W; j++) total[j] += mine ? static_cast<float>(rows[k].v[j]) : 0.f;
    }
  }
  Vec<T> sum;
  if (ONTO) sum = load<T>(out, (size_t)id * PARTS + part);
  #pragma unroll
  for (int j = 0; j < W; j++) sum.v[j] = static_cast<T>(ONTO ? static_cast<float>(sum.v[j]) + total[j] : total[j]);
  store<T>(out, (size_t)id * PARTS + part, sum);
}
