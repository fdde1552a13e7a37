// Decoding on CPUs: linear layers of a few rows over packed weights, and attention of draft trees over slots.
//
// Both ops give every row the same bits whatever rows are beside it: sums run in one order, fixed by the row alone. So a
// tree that is verified in one forward rounds as token by token decoding does, and the two agree exactly.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/narrow.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include <omp.h>
#include <sys/mman.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

using at::Tensor;

constexpr int64_t LANES = 16;            // outputs in a vector of fp32
constexpr int64_t BLOCK = 4 * LANES;     // outputs packed together
constexpr int64_t ROWS = 6;              // rows multiplied at a time: 24 vectors of sums, 4 of weights

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

inline float widen(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  return std::bit_cast<float>(bits);
}

inline uint16_t narrow(float x) {  // to nearest, ties to even
  uint32_t bits = std::bit_cast<uint32_t>(x);
  uint32_t even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 | 64) : even);  // what is no number stays none
}

// One step of a dot product: two bf16 weights or one fp32 weight for each of 16 outputs, times one row's inputs.
template <typename T>
struct Step;

template <>
struct Step<uint16_t> {
  static constexpr int64_t DEPTH = 2;
#if defined(__AVX512BF16__)
  using Weights = __m512bh;
  static Weights load(const uint16_t* w) { return (__m512bh)_mm512_loadu_si512(w); }
  static void add(f32x16& sum, Weights w, const uint16_t* x) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    sum = (f32x16)_mm512_dpbf16_ps((__m512)sum, w, (__m512bh)_mm512_set1_epi32(pair));
  }
#else
  using Weights = u32x16;
  static Weights load(const uint16_t* w) {
    Weights v;
    std::memcpy(&v, w, 64);
    return v;
  }
  static void add(f32x16& sum, Weights w, const uint16_t* x) {
    sum += std::bit_cast<f32x16>(w << 16) * widen(x[0]);
    sum += std::bit_cast<f32x16>(w & 0xffff0000u) * widen(x[1]);
  }
#endif
};

template <>
struct Step<float> {
  static constexpr int64_t DEPTH = 1;
  using Weights = f32x16;
  static Weights load(const float* w) {
    Weights v;
    std::memcpy(&v, w, 64);
    return v;
  }
  static void add(f32x16& sum, Weights w, const float* x) { sum += w * *x; }
};

inline void store(uint16_t* out, f32x16 sum, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = narrow(sum[i]);
}
inline void store(float* out, f32x16 sum, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = sum[i];
}
inline float as_float(uint16_t x) { return widen(x); }
inline float as_float(float x) { return x; }

// R rows times B blocks of 64 outputs.
template <typename T, int R, int B = 1>
void multiply(const T* x, int64_t stride, const T* w, int64_t steps, const T* bias, T* out, int64_t out_stride,
              int64_t outputs) {
  using S = Step<T>;
  f32x16 sums[R][4 * B] = {};
  for (int64_t k = 0; k < steps; ++k) {
    typename S::Weights v[4 * B];
    for (int b = 0; b < B; ++b) {
      const T* here = w + (b * steps + k) * BLOCK * S::DEPTH;
      for (int i = 0; i < 4; ++i) v[b * 4 + i] = S::load(here + i * LANES * S::DEPTH);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int b = 0; b < 4 * B; ++b) S::add(sums[r][b], v[b], x + r * stride + k * S::DEPTH);
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < 4 * B; ++b) {
      int64_t count = std::min(LANES, outputs - b * LANES);
      if (count <= 0) break;
      if (bias)
        for (int64_t i = 0; i < count; ++i) sums[r][b][i] += as_float(bias[b * LANES + i]);
      store(out + r * out_stride + b * LANES, sums[r][b], count);
    }
}

template <typename T>
void multiply_rows(int64_t rows, const T* x, int64_t stride, const T* w, int64_t steps, const T* bias, T* out,
                   int64_t out_stride, int64_t outputs) {
  switch (rows) {
    case 1: return multiply<T, 1>(x, stride, w, steps, bias, out, out_stride, outputs);
    case 2: return multiply<T, 2>(x, stride, w, steps, bias, out, out_stride, outputs);
    case 3: return multiply<T, 3>(x, stride, w, steps, bias, out, out_stride, outputs);
    case 4: return multiply<T, 4>(x, stride, w, steps, bias, out, out_stride, outputs);
    case 5: return multiply<T, 5>(x, stride, w, steps, bias, out, out_stride, outputs);
    case 6: return multiply<T, 6>(x, stride, w, steps, bias, out, out_stride, outputs);
  }
}

template <typename T>
void linear_rows(const T* x, int64_t rows, int64_t stride, const T* packed, int64_t steps, const T* bias, T* out,
                 int64_t outputs) {
  int64_t blocks = (outputs + BLOCK - 1) / BLOCK, parts = (rows + ROWS - 1) / ROWS;
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const T* w = packed + block * steps * BLOCK * Step<T>::DEPTH;
      int64_t first = block * BLOCK, count = std::min(BLOCK, outputs - first), row = 0;
      if (rows <= 2 && block + 1 < end) {  // one or two rows give a block too few sums at a time to hide their latency
        count = std::min(2 * BLOCK, outputs - first);
        const T* added = bias ? bias + first : nullptr;
        if (rows == 1) multiply<T, 1, 2>(x, stride, w, steps, added, out + first, outputs, count);
        else multiply<T, 2, 2>(x, stride, w, steps, added, out + first, outputs, count);
        ++block;
        continue;
      }
      for (int64_t part = 0; part < parts; ++part) {  // parts of like size; those behind the first find the block in L2
        int64_t size = (rows - row + parts - part - 1) / (parts - part);
        multiply_rows<T>(size, x + row * stride, stride, w, steps, bias ? bias + first : nullptr,
                         out + row * outputs + first, outputs, count);
        row += size;
      }
    }
  });
}

// x [..., K] times packed weights of N outputs: [..., N].
Tensor linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs) {
  Tensor x = input.contiguous();
  auto sizes = x.sizes().vec();
  int64_t width = sizes.back(), rows = width ? x.numel() / width : 0;
  sizes.back() = outputs;
  Tensor out = at::empty(sizes, x.options());
  const void* added = bias ? bias->const_data_ptr() : nullptr;
  if (x.scalar_type() == at::kFloat) {
    linear_rows<float>(x.const_data_ptr<float>(), rows, width, packed.const_data_ptr<float>(), width, (const float*)added,
                       out.mutable_data_ptr<float>(), outputs);
  } else {
    linear_rows<uint16_t>((const uint16_t*)x.const_data_ptr(), rows, width, (const uint16_t*)packed.const_data_ptr(),
                          width / 2, (const uint16_t*)added, (uint16_t*)out.mutable_data_ptr(), outputs);
  }
  return out;
}

template <typename T>
void pack_into(const T* w, T* out, int64_t outputs, int64_t width) {
  constexpr int64_t D = Step<T>::DEPTH;
  int64_t blocks = (outputs + BLOCK - 1) / BLOCK, steps = width / D;
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      for (int64_t k = 0; k < steps; ++k)
        for (int64_t n = 0; n < BLOCK; ++n)
          for (int64_t d = 0; d < D; ++d) {
            int64_t row = block * BLOCK + n;
            out[((block * steps + k) * BLOCK + n) * D + d] = row < outputs ? w[row * width + k * D + d] : T(0);
          }
  });
}

// Memory of huge pages that many tensors share: a matrix of its own is often smaller than one such page, and with small
// ones a core reads a third slower.
struct Arena {
  static constexpr size_t PAGE = size_t(1) << 21, SIZE = size_t(1) << 26;
  char* mapped;
  size_t bytes, used = 0;

  explicit Arena(size_t least) : bytes((std::max(least, SIZE) + PAGE - 1) / PAGE * PAGE + PAGE) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    mapped = (char*)at;
    used = (PAGE - uintptr_t(mapped) % PAGE) % PAGE;
#if defined(MADV_HUGEPAGE)
    madvise(mapped, bytes, MADV_HUGEPAGE);
#endif
  }
  ~Arena() { munmap(mapped, bytes); }
};

Tensor empty_weights(int64_t count, const at::TensorOptions& options) {
  static std::mutex lock;
  static std::shared_ptr<Arena> current;
  std::lock_guard<std::mutex> guard(lock);
  size_t bytes = (count * options.dtype().itemsize() + 63) / 64 * 64;
  if (!current || current->used + bytes > current->bytes) current = std::make_shared<Arena>(bytes);
  char* at = current->mapped + current->used;
  current->used += bytes;
  return at::from_blob(at, {count}, [arena = current](void*) {}, options);
}

// Weights [N, K] in the order that `linear` reads them in.
Tensor pack(const Tensor& weight) {
  Tensor w = weight.contiguous();
  int64_t outputs = w.size(0), width = w.size(1), blocks = (outputs + BLOCK - 1) / BLOCK;
  Tensor out = empty_weights(blocks * BLOCK * width, w.options());
  if (w.scalar_type() == at::kFloat)
    pack_into<float>(w.const_data_ptr<float>(), out.mutable_data_ptr<float>(), outputs, width);
  else
    pack_into<uint16_t>((const uint16_t*)w.const_data_ptr(), (uint16_t*)out.mutable_data_ptr(), outputs, width);
  return out;
}

// e^x for x <= 0, to some 2 ulp; the loop over an array of it becomes vector code.
inline float exponential(float x) {
  x = x > -87.0f ? x : -87.0f;
  float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest integer
  float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * std::bit_cast<float>(int32_t(n + 127) << 23);
}

struct Cache {
  char* keys;
  char* values;
  int64_t layer, slot, head;  // strides in elements; rows follow each other
};

struct Shape {
  int64_t rows, heads, kv_heads, size;
  float scale;
  int64_t window;  // 0: none
  float softcap;   // 0: none
};

inline f32x16 load16(const float* x) {
  f32x16 v;
  std::memcpy(&v, x, 64);
  return v;
}
inline f32x16 load16(const uint16_t* x) {
  typedef uint16_t u16x16 __attribute__((vector_size(32)));
  u16x16 half;
  std::memcpy(&half, x, 32);
  return std::bit_cast<f32x16>(__builtin_convertvector(half, u32x16) << 16);
}

// The sums of the lanes of four vectors; each is added up in the same order.
inline void add_lanes(const f32x16 v[4], float out[4]) {
#if defined(__AVX512F__)
  __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  __m512d low = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), high = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
  __m512 all = _mm512_add_ps((__m512)low, (__m512)high);
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), (__m256)_mm512_extractf64x4_pd((__m512d)all, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  for (int i = 0; i < 4; ++i) {
    float sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += v[i][lane];
    out[i] = sum;
  }
#endif
}

// Scores become e^(score - highest); returns their sum. The array is padded to whole vectors.
inline float exponentials(float* score, int64_t count, int64_t padded) {
  for (int64_t i = count; i < padded; ++i) score[i] = -std::numeric_limits<float>::infinity();
  f32x16 highest = load16(score), sum = {};
  for (int64_t i = LANES; i < padded; i += LANES) {
    f32x16 here = load16(score + i);
    highest = here > highest ? here : highest;
  }
  float top = highest[0];
  for (int lane = 1; lane < LANES; ++lane) top = std::max(top, highest[lane]);
#pragma GCC ivdep
  for (int64_t i = 0; i < padded; ++i) score[i] = exponential(score[i] - top);
  for (int64_t i = count; i < padded; ++i) score[i] = 0;
  for (int64_t i = 0; i < padded; i += LANES) sum += load16(score + i);
  float total = 0;
  for (int lane = 0; lane < LANES; ++lane) total += sum[lane];
  return total;
}

constexpr int64_t HEADS = 4;  // query heads that read a key together

// Scores and weighted values of up to four query heads of one row, D = 16 C; `row(i)` is the place of the i-th key seen.
template <typename T, int C, int G, typename Row>
void attend_heads(const float* q, const T* keys, const T* values, int64_t count, const Row& row, float softcap, float* score,
                  T* out) {
  constexpr int64_t D = C * LANES;
  const int64_t padded = (count + LANES - 1) / LANES * LANES;
  for (int64_t i = 0; i < count; i += 4) {
    f32x16 sums[G][4] = {};
    int64_t size = std::min<int64_t>(4, count - i);
    for (int64_t j = 0; j < size; ++j) {
      const T* k = keys + row(i + j) * D;
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) {
        f32x16 key = load16(k + c * LANES);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) sums[g][j] += load16(q + g * D + c * LANES) * key;
      }
    }
    for (int g = 0; g < G; ++g) {
      float four[4];
      add_lanes(sums[g], four);
      for (int64_t j = 0; j < size; ++j) {
        score[g * padded + i + j] = softcap != 0 ? softcap * std::tanh(four[j] / softcap) : four[j];
      }
    }
  }
  float total[G];
  for (int g = 0; g < G; ++g) total[g] = exponentials(score + g * padded, count, padded);
  f32x16 sums[G][C] = {};
  for (int64_t i = 0; i < count; ++i) {
    const T* v = values + row(i) * D;
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      f32x16 value = load16(v + c * LANES);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[g][c] += value * score[g * padded + i];
    }
  }
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < C; ++c) store(out + g * D + c * LANES, sums[g][c] * (1.0f / total[g]), LANES);
}

// Any head size.
template <typename T, typename Row>
void attend_head(const float* q, const T* keys, const T* values, int64_t count, const Row& row, float softcap, float* score,
                 int64_t size, T* out) {
  float highest = -std::numeric_limits<float>::infinity(), total = 0;
  for (int64_t i = 0; i < count; ++i) {
    float value = 0;
    for (int64_t d = 0; d < size; ++d) value += q[d] * as_float(keys[row(i) * size + d]);
    if (softcap != 0) value = softcap * std::tanh(value / softcap);
    score[i] = value;
    highest = std::max(highest, value);
  }
  for (int64_t i = 0; i < count; ++i) total += score[i] = exponential(score[i] - highest);
  for (int64_t d = 0; d < size; ++d) {
    float sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += score[i] * as_float(values[row(i) * size + d]);
    if constexpr (sizeof(T) == 4) out[d] = sum / total;
    else out[d] = narrow(sum / total);
  }
}

// One row's heads of one group: over the keys it sees, in the order of their positions.
template <typename T>
void attend_row(const T* q, int64_t head_stride, const T* keys, const T* values, const int64_t* place, const Shape& s,
                T* out, std::vector<int64_t>& seen, std::vector<float>& work) {
  int64_t prefix = place[2], group = s.heads / s.kv_heads;
  uint64_t word = uint64_t(place[3]);
  int64_t position = prefix + std::popcount(word) - 1, first = s.window ? std::max<int64_t>(0, position - s.window + 1) : 0;
  seen.clear();
  for (int64_t depth = 0; word; word &= word - 1, ++depth)
    if (prefix + depth >= first) seen.push_back(prefix + std::countr_zero(word));
  int64_t stable = std::max<int64_t>(0, prefix - first), count = stable + int64_t(seen.size());
  work.resize(HEADS * (count + LANES + s.size));
  float *query = work.data(), *score = query + HEADS * s.size;
  auto row = [&](int64_t i) { return i < stable ? first + i : seen[i - stable]; };
  for (int64_t g = 0; g < group;) {
    int64_t heads = std::min(HEADS, group - g);
    for (int64_t i = 0; i < heads; ++i)
      for (int64_t d = 0; d < s.size; ++d) query[i * s.size + d] = as_float(q[(g + i) * head_stride + d]) * s.scale;
    T* result = out + g * s.size;
#define EAGLE_HEADS(C, G) attend_heads<T, C, G>(query, keys, values, count, row, s.softcap, score, result)
#define EAGLE_SIZE(C)                            \
  switch (heads) {                               \
    case 1: EAGLE_HEADS(C, 1); break;            \
    case 2: EAGLE_HEADS(C, 2); break;            \
    case 3: EAGLE_HEADS(C, 3); break;            \
    default: EAGLE_HEADS(C, 4);                  \
  }                                              \
  break
    switch (s.size) {
      case 64: EAGLE_SIZE(4);
      case 128: EAGLE_SIZE(8);
      default:
        for (int64_t i = 0; i < heads; ++i)
          attend_head<T>(query + i * s.size, keys, values, count, row, s.softcap, score, s.size, result + i * s.size);
    }
#undef EAGLE_SIZE
#undef EAGLE_HEADS
    g += heads;
  }
}

template <typename T>
void attend_rows(const Tensor& q, const Tensor& k, const Tensor& v, const Cache& cache, const int64_t* places,
                 const Shape& s, T* out) {
  const T *qs = (const T*)q.const_data_ptr(), *ks = (const T*)k.const_data_ptr(), *vs = (const T*)v.const_data_ptr();
  T *keys = (T*)cache.keys, *values = (T*)cache.values;
  for (int64_t m = 0; m < s.rows; ++m) {
    const int64_t* place = places + m * 4;
    if (place[0] < 0) continue;
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      int64_t at = place[0] * cache.slot + h * cache.head + place[1] * s.size;
      std::memcpy(keys + at, ks + h * k.stride(1) + m * k.stride(2), s.size * sizeof(T));
      std::memcpy(values + at, vs + h * v.stride(1) + m * v.stride(2), s.size * sizeof(T));
    }
  }
  int64_t group = s.heads / s.kv_heads;
  at::parallel_for(0, s.rows * s.kv_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> seen;
    std::vector<float> work;
    for (int64_t task = begin; task < end; ++task) {
      int64_t m = task / s.kv_heads, h = task % s.kv_heads;
      const int64_t* place = places + m * 4;
      T* result = out + (m * s.heads + h * group) * s.size;
      if (place[0] < 0) {
        std::memset((void*)result, 0, group * s.size * sizeof(T));
        continue;
      }
      int64_t at = place[0] * cache.slot + h * cache.head;
      attend_row<T>(qs + h * group * q.stride(1) + m * q.stride(2), q.stride(1), keys + at, values + at, place, s, result,
                    seen, work);
    }
  });
}

// q [1, Hq, M, D], k and v [1, Hkv, M, D]: stores keys and values in their slots, and attends: [1, M, Hq, D].
Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& places, const Tensor& cache, int64_t layer,
              double scale, int64_t window, double softcap) {
  const int64_t* where = cache.const_data_ptr<int64_t>();
  int64_t bytes = q.element_size();
  Cache at_layer{(char*)where[0] + layer * where[2] * bytes, (char*)where[1] + layer * where[2] * bytes, where[2], where[3],
                 where[4]};
  Shape shape{q.size(2), q.size(1), k.size(1), q.size(3), float(scale), window, float(softcap)};
  auto last_is_dense = [](const Tensor& t) { return t.stride(3) == 1 ? t : t.contiguous(); };
  Tensor out = at::empty({1, shape.rows, shape.heads, shape.size}, q.options());
  const int64_t* rows = places.const_data_ptr<int64_t>();
  if (q.scalar_type() == at::kFloat)
    attend_rows<float>(last_is_dense(q), last_is_dense(k), last_is_dense(v), at_layer, rows, shape,
                       out.mutable_data_ptr<float>());
  else
    attend_rows<uint16_t>(last_is_dense(q), last_is_dense(k), last_is_dense(v), at_layer, rows, shape,
                          (uint16_t*)out.mutable_data_ptr());
  return out;
}

// The first greatest value's index along the last dimension, int64 [...] of [..., V].
Tensor argmax(const Tensor& values) {
  Tensor x = values.contiguous();
  auto sizes = x.sizes().vec();
  int64_t width = sizes.back();
  sizes.pop_back();
  Tensor out = at::empty(sizes, x.options().dtype(at::kLong));
  int64_t* found = out.mutable_data_ptr<int64_t>();
  auto search = [&](const auto* row) {
    f32x16 highest = {};
    highest -= std::numeric_limits<float>::infinity();
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
      f32x16 here = load16(row + i);
      highest = here > highest ? here : highest;
    }
    float top = -std::numeric_limits<float>::infinity();
    for (int lane = 0; lane < LANES; ++lane) top = std::max(top, highest[lane]);
    for (; i < width; ++i) top = std::max(top, as_float(row[i]));
    for (i = 0; i < width; ++i)
      if (as_float(row[i]) == top) return i;
    return int64_t(0);
  };
  at::parallel_for(0, out.numel(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m)
      found[m] = x.scalar_type() == at::kFloat ? search(x.const_data_ptr<float>() + m * width)
                                               : search((const uint16_t*)x.const_data_ptr() + m * width);
  });
  return out;
}

// ---- whole decoder layers ----

inline float rounded(float x, const uint16_t*) { return widen(narrow(x)); }
inline float rounded(float x, const float*) { return x; }
inline void put(uint16_t* out, float x) { *out = narrow(x); }
inline void put(float* out, float x) { *out = x; }

// Shares work among the threads of a parallel region, in runs; all have ended when it returns.
template <typename F>
void share(int64_t count, const F& work) {
  int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
  for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; ++i) work(i);
#pragma omp barrier
}

// Blocks of outputs [R, up to 64] of packed weights, for every row; `use(block, out, stride, count)` takes them.
template <typename T, typename F>
void share_blocks(const T* x, int64_t rows, int64_t width, const Tensor& packed, const Tensor& bias, int64_t outputs,
                  std::vector<T>& local, const F& use) {
  int64_t blocks = (outputs + BLOCK - 1) / BLOCK, parts = (rows + ROWS - 1) / ROWS, steps = width / Step<T>::DEPTH;
  const T *weights = (const T*)packed.const_data_ptr(), *added = bias.numel() ? (const T*)bias.const_data_ptr() : nullptr;
  int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads(), end = blocks * (thread + 1) / threads;
  local.resize(rows * 2 * BLOCK);
  for (int64_t block = blocks * thread / threads; block < end;) {
    const T* w = weights + block * width * BLOCK;
    int64_t first = block * BLOCK, together = rows <= 2 && block + 1 < end ? 2 : 1, row = 0;
    int64_t count = std::min(together * BLOCK, outputs - first), stride = together * BLOCK;
    const T* b = added ? added + first : nullptr;
    if (together == 2) {
      if (rows == 1) multiply<T, 1, 2>(x, width, w, steps, b, local.data(), stride, count);
      else multiply<T, 2, 2>(x, width, w, steps, b, local.data(), stride, count);
    } else {
      for (int64_t part = 0; part < parts; ++part) {
        int64_t size = (rows - row + parts - part - 1) / (parts - part);
        multiply_rows<T>(size, x + row * width, width, w, steps, b, local.data() + row * stride, stride, count);
        row += size;
      }
    }
    use(first, local.data(), stride, count);
    block += together;
  }
#pragma omp barrier
}

struct Norm {
  float eps;
  int64_t kind;  // 0: rounded, then times weight (Llama); 1: times (1 + weight), then rounded (Gemma); 2: times weight, then rounded
};

template <typename T>
void rms_norm(const T* x, const T* weight, int64_t size, const Norm& norm, T* out) {
  f32x16 squares = {};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    f32x16 v = load16(x + i);
    squares += v * v;
  }
  float sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += squares[lane];
  for (; i < size; ++i) sum += as_float(x[i]) * as_float(x[i]);
  float scale = 1.0f / std::sqrt(sum / size + norm.eps);
  float added = norm.kind == 1 ? 1.0f : 0.0f;
  if (norm.kind == 0)
    for (i = 0; i < size; ++i) put(out + i, rounded(as_float(x[i]) * scale, x) * as_float(weight[i]));
  else
    for (i = 0; i < size; ++i) put(out + i, as_float(x[i]) * scale * (added + as_float(weight[i])));
}

// x [..., h] normed, with a gain [h]; see Norm.
Tensor norm(const Tensor& input, const Tensor& weight, double eps, int64_t kind) {
  Tensor x = input.contiguous(), out = at::empty_like(x);
  int64_t size = x.size(-1), rows = size ? x.numel() / size : 0;
  Norm how{float(eps), kind};
  at::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      if (x.scalar_type() == at::kFloat)
        rms_norm(x.const_data_ptr<float>() + m * size, weight.const_data_ptr<float>(), size, how,
                 out.mutable_data_ptr<float>() + m * size);
      else
        rms_norm((const uint16_t*)x.const_data_ptr() + m * size, (const uint16_t*)weight.const_data_ptr(), size, how,
                 (uint16_t*)out.mutable_data_ptr() + m * size);
    }
  });
  return out;
}

// Turns the first `turned` entries of a head; cos and sin are of the model's dtype, and products are rounded as there, or fp32.
template <typename T>
void rotate(T* head, const void* cos, const void* sin, bool full, int64_t turned) {
  int64_t half = turned / 2;
  for (int64_t i = 0; i < half; ++i) {
    float a = as_float(head[i]), b = as_float(head[i + half]);
    if (full) {
      const float *c = (const float*)cos, *s = (const float*)sin;
      put(head + i, a * c[i] - b * s[i]);
      put(head + i + half, b * c[i + half] + a * s[i + half]);
    } else {
      const T *c = (const T*)cos, *s = (const T*)sin;
      put(head + i, rounded(a * as_float(c[i]), head) - rounded(b * as_float(s[i]), head));
      put(head + i + half, rounded(b * as_float(c[i + half]), head) + rounded(a * as_float(s[i + half]), head));
    }
  }
}

// x / (1 + e^-x)
inline float silu(float x) {
  float e = exponential(x < 0 ? x : -x);
  return x * (x < 0 ? e : 1.0f) / (1.0f + e);
}

// GELU by tanh, and tanh z = 2 sigmoid(2z) - 1.
inline float gelu(float x) {
  float z = 1.5957691216f * (x + 0.044715f * x * x * x), e = exponential(z < 0 ? z : -z);
  return x * (z < 0 ? e : 1.0f) / (1.0f + e);
}

template <typename T>
void activate(const T* gate, const T* up, int64_t count, bool is_gelu, T* out) {
  if (is_gelu) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) put(out + i, rounded(gelu(as_float(gate[i])), gate) * as_float(up[i]));
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) put(out + i, rounded(silu(as_float(gate[i])), gate) * as_float(up[i]));
  }
}

enum LayerTensor { NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, OUT_BIAS, POST_NORM, MLP_NORM, GATE_UP, DOWN, POST_MLP_NORM, TENSORS };

// Decoder layers of Llama's kind over rows [M, h]; see kernels/cpu/__init__.py.
template <typename T>
void run_layers(Tensor& x, const std::optional<Tensor>& input, const Tensor& places, const Tensor& cache, const Tensor& cos,
                const Tensor& sin, at::TensorList weights, at::IntArrayRef layers, at::IntArrayRef sizes, double scale,
                double softcap, const Norm& norm, at::TensorList taps, at::IntArrayRef tapped) {
  int64_t rows = x.size(0), width = x.size(1), heads = sizes[0], kv_heads = sizes[1], size = sizes[2], inner = sizes[3];
  int64_t activation = sizes[4], turned = cos.size(-1), depth = layers.size() / 2, group = heads / kv_heads;
  int64_t all_heads = heads + 2 * kv_heads;
  bool full = cos.scalar_type() == at::kFloat && sizeof(T) == 2;
  const int64_t *where = cache.const_data_ptr<int64_t>(), *place = places.const_data_ptr<int64_t>();
  Tensor normed = at::empty({rows, width}, x.options()), qkv = at::empty({rows, all_heads * size}, x.options());
  Tensor seen = at::empty({rows, heads * size}, x.options()), gated = at::empty({rows, inner}, x.options());
  Tensor added = at::empty({rows, width}, x.options());
  T *xs = (T*)x.mutable_data_ptr(), *ns = (T*)normed.mutable_data_ptr(), *qs = (T*)qkv.mutable_data_ptr();
  T *as = (T*)seen.mutable_data_ptr(), *gs = (T*)gated.mutable_data_ptr(), *os = (T*)added.mutable_data_ptr();
  auto tensor = [&](int64_t layer, int which) -> const Tensor& { return weights[layer * TENSORS + which]; };
  auto data = [&](int64_t layer, int which) { return (const T*)tensor(layer, which).const_data_ptr(); };
  auto has = [&](int64_t layer, int which) { return tensor(layer, which).numel() > 0; };
  const int64_t bytes = sizeof(T), cos_row = turned * cos.element_size(), cos_kind = rows * cos_row;
#pragma omp parallel num_threads(at::get_num_threads())
  {
    std::vector<T> local;
    std::vector<int64_t> path;
    std::vector<float> work;
    // x += what a layer adds, of blocks or, behind a norm of its own, of whole rows
    auto add_to = [&](int64_t layer, int post, const T* in, int64_t in_width, int which, const Tensor& bias) {
      bool later = has(layer, post);
      share_blocks<T>(in, rows, in_width, tensor(layer, which), bias, width, local,
                      [&](int64_t first, const T* out, int64_t stride, int64_t count) {
                        for (int64_t m = 0; m < rows; ++m)
                          for (int64_t i = 0; i < count; ++i) {
                            int64_t at = m * width + first + i;
                            if (later) os[at] = out[m * stride + i];
                            else put(xs + at, as_float(xs[at]) + as_float(out[m * stride + i]));
                          }
                      });
      if (!later) return;
      share(rows, [&](int64_t m) {
        rms_norm<T>(os + m * width, data(layer, post), width, norm, os + m * width);
        for (int64_t i = 0; i < width; ++i) put(xs + m * width + i, as_float(xs[m * width + i]) + as_float(os[m * width + i]));
      });
    };
    for (int64_t layer = 0; layer < depth; ++layer) {
      int64_t rope = layers[layer * 2], window = layers[layer * 2 + 1];
      for (size_t t = 0; t < tapped.size(); ++t)
        if (tapped[t] == layer) {
          T* out = (T*)taps[t].mutable_data_ptr();
          int64_t stride = taps[t].stride(0);
          share(rows, [&](int64_t m) { std::memcpy(out + m * stride, xs + m * width, width * bytes); });
        }
      bool given = input && layer == 0;
      if (!given)
        share(rows, [&](int64_t m) { rms_norm<T>(xs + m * width, data(layer, NORM), width, norm, ns + m * width); });
      const T* entry = given ? (const T*)input->const_data_ptr() : ns;
      share_blocks<T>(entry, rows, given ? input->size(1) : width, tensor(layer, QKV), tensor(layer, QKV_BIAS), all_heads * size, local,
                      [&](int64_t first, const T* out, int64_t stride, int64_t count) {
                        for (int64_t m = 0; m < rows; ++m)
                          std::memcpy(qs + m * all_heads * size + first, out + m * stride, count * bytes);
                      });
      char* keys = (char*)where[0] + layer * where[2] * bytes;
      char* values = (char*)where[1] + layer * where[2] * bytes;
      share(rows * (heads + kv_heads), [&](int64_t task) {
        int64_t m = task / (heads + kv_heads), h = task % (heads + kv_heads);
        T* head = qs + (m * all_heads + h) * size;
        const int64_t* p = place + m * 4;
        if (p[0] < 0) return;
        int which = h < heads ? Q_NORM : K_NORM;
        if (has(layer, which)) rms_norm<T>(head, data(layer, which), size, norm, head);
        int64_t angle = rope * cos_kind + m * cos_row;
        if (rope >= 0)
          rotate<T>(head, (const char*)cos.const_data_ptr() + angle, (const char*)sin.const_data_ptr() + angle, full, turned);
        if (h < heads) return;
        int64_t at = p[0] * where[3] + (h - heads) * where[4] + p[1] * size;
        std::memcpy((T*)keys + at, head, size * bytes);
        std::memcpy((T*)values + at, head + kv_heads * size, size * bytes);
      });
      Shape shape{rows, heads, kv_heads, size, float(scale), window, float(softcap)};
      share(rows * kv_heads, [&](int64_t task) {
        int64_t m = task / kv_heads, h = task % kv_heads;
        T* result = as + (m * heads + h * group) * size;
        const int64_t* p = place + m * 4;
        if (p[0] < 0) {
          std::memset((void*)result, 0, group * size * bytes);
          return;
        }
        int64_t at = p[0] * where[3] + h * where[4];
        attend_row<T>(qs + (m * all_heads + h * group) * size, size, (const T*)keys + at, (const T*)values + at, p, shape,
                      result, path, work);
      });
      add_to(layer, POST_NORM, as, heads * size, OUT, tensor(layer, OUT_BIAS));
      share(rows, [&](int64_t m) { rms_norm<T>(xs + m * width, data(layer, MLP_NORM), width, norm, ns + m * width); });
      // Gate and up are packed in turns of 32, so that a block has both halves of its products.
      share_blocks<T>(ns, rows, width, tensor(layer, GATE_UP), Tensor(at::empty({0}, x.options())), 2 * inner, local,
                      [&](int64_t first, const T* out, int64_t stride, int64_t count) {
                        for (int64_t m = 0; m < rows; ++m)
                          for (int64_t b = 0; b < count; b += BLOCK) {
                            const T* gate = out + m * stride + b;
                            int64_t half = std::min(BLOCK, count - b) / 2;
                            activate(gate, gate + half, half, activation == 1, gs + m * inner + (first + b) / 2);
                          }
                      });
      add_to(layer, POST_MLP_NORM, gs, inner, DOWN, Tensor(at::empty({0}, x.options())));
    }
  }
}

// States [M, h] behind the layers of states before them; `input` [M, K] stands for the first layer's normed x.
Tensor layers(const Tensor& states, const std::optional<Tensor>& input, const Tensor& places, const Tensor& cache,
              const Tensor& cos, const Tensor& sin, at::TensorList weights, at::IntArrayRef kinds, at::IntArrayRef sizes,
              double scale, double softcap, double eps, int64_t norms, const Tensor& features, at::IntArrayRef tapped) {
  Tensor x = states.clone();
  std::vector<Tensor> taps;
  for (size_t t = 0; t < tapped.size(); ++t) taps.push_back(features.narrow(1, t * x.size(1), x.size(1)));
  Norm norm{float(eps), norms};
  auto run = x.scalar_type() == at::kFloat ? run_layers<float> : run_layers<uint16_t>;
  run(x, input, places, cache, cos, sin, weights, kinds, sizes, scale, softcap, norm, taps, tapped);
  return x;
}

}  // namespace

TORCH_LIBRARY(eagle_cpu, library) {
  library.def("pack(Tensor weight) -> Tensor");
  library.def("argmax(Tensor values) -> Tensor");
  library.def("norm(Tensor x, Tensor weight, float eps, int kind) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor");
  library.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor places, Tensor cache, int layer, float scale, int window, "
      "float softcap) -> Tensor");
  library.def(
      "layers(Tensor x, Tensor? input, Tensor places, Tensor cache, Tensor cos, Tensor sin, Tensor[] weights, int[] kinds, "
      "int[] sizes, float scale, float softcap, float eps, int norms, Tensor(a!) features, int[] tapped) -> Tensor");
}

TORCH_LIBRARY_IMPL(eagle_cpu, CPU, library) {
  library.impl("pack", pack);
  library.impl("argmax", argmax);
  library.impl("norm", norm);
  library.impl("linear", linear);
  library.impl("attend", attend);
  library.impl("layers", layers);
}
