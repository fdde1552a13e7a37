// Attention of draft trees over slots.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <vector>

#include "attend_tiles.h"
#include "numbers.h"

namespace eagle {

using at::Tensor;

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

// The places of the keys that a row sees: a run of the prefix, then nodes.
struct Seen {
  int64_t first, stable;
  const int64_t* nodes;

  int64_t operator()(int64_t i) const { return i < stable ? first + i : nodes[i - stable]; }
};

constexpr int64_t HEADS = 4;  // query heads that read a key together

// Products of a key with queries of D = 16 C entries: sums[g] is added to, `stride` lies between queries.
template <int C, int G>
inline void add_products(const float* q, int64_t stride, const float* key, f32x16 (&sums)[G][4], int64_t at) {
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) {
    f32x16 k = load16(key + c * LANES);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) sums[g][at] = fused(load16(q + g * stride + c * LANES), k, sums[g][at]);
  }
}
template <int C, int G>
inline void add_products(const uint16_t* q, int64_t stride, const uint16_t* key, f32x16 (&sums)[G][4], int64_t at) {
#if defined(__AVX512BF16__)
#pragma GCC unroll 8
  for (int c = 0; c < C / 2; ++c) {
    __m512bh k = (__m512bh)_mm512_loadu_si512(key + c * 2 * LANES);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      __m512bh x = (__m512bh)_mm512_loadu_si512(q + g * stride + c * 2 * LANES);
      sums[g][at] = (f32x16)_mm512_dpbf16_ps((__m512)sums[g][at], x, k);
    }
  }
#else
  for (int c = 0; c < C; ++c) {
    f32x16 k = load16(key + c * LANES);
    for (int g = 0; g < G; ++g) sums[g][at] = fused(load16(q + g * stride + c * LANES), k, sums[g][at]);
  }
#endif
}

// Scores and weighted values of up to four query heads of one row, D = 16 C; `row(i)` is the place of the i-th key seen.
template <typename T, int C, int G>
void attend_heads(const T* q, int64_t stride, const T* keys, const T* values, int64_t count, const Seen& row, float scale,
                  float softcap, float* score, T* out) {
  constexpr int64_t D = C * LANES;
  const int64_t padded = (count + LANES - 1) / LANES * LANES;
  auto scores = [&](int64_t i, int64_t size, const f32x16 (&sums)[G][4]) {
    for (int g = 0; g < G; ++g) {
      float four[4];
      add_lanes(sums[g], four);
      for (int64_t j = 0; j < size; ++j) {
        float value = four[j] * scale;
        score[g * padded + i + j] = softcap != 0 ? softcap * std::tanh(value / softcap) : value;
      }
    }
  };
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    f32x16 sums[G][4] = {};
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) add_products<C, G>(q, stride, keys + row(i + j) * D, sums, j);
    scores(i, 4, sums);
  }
  if (i < count) {
    f32x16 sums[G][4] = {};
    for (int64_t j = 0; i + j < count; ++j) add_products<C, G>(q, stride, keys + row(i + j) * D, sums, j);
    scores(i, count - i, sums);
  }
  float total[G];
  for (int g = 0; g < G; ++g) total[g] = exponentials(score + g * padded, count, padded);
  f32x16 sums[G][C] = {};
  for (i = 0; i < count; ++i) {
    const T* v = values + row(i) * D;
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      f32x16 value = load16(v + c * LANES);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[g][c] = fused(value, f32x16{} + score[g * padded + i], sums[g][c]);
    }
  }
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < C; ++c) store(out + g * D + c * LANES, sums[g][c] * (1.0f / total[g]), LANES);
}

// Any head size.
template <typename T>
void attend_head(const T* q, const T* keys, const T* values, int64_t count, const Seen& row, float scale, float softcap,
                 float* score, int64_t size, T* out) {
  float highest = -std::numeric_limits<float>::infinity(), total = 0;
  for (int64_t i = 0; i < count; ++i) {
    float value = 0;
    for (int64_t d = 0; d < size; ++d) value += as_float(q[d]) * as_float(keys[row(i) * size + d]);
    value *= scale;
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
                T* out, AttendMemory& memory) {
  int64_t prefix = place[2], group = s.heads / s.kv_heads;
  uint64_t word = uint64_t(place[3]);
  int64_t position = prefix + std::popcount(word) - 1, first = s.window ? std::max<int64_t>(0, position - s.window + 1) : 0;
  std::vector<int64_t>& nodes = memory.path;
  nodes.clear();
  for (int64_t depth = 0; word; word &= word - 1, ++depth)
    if (prefix + depth >= first) nodes.push_back(prefix + std::countr_zero(word));
  int64_t stable = std::max<int64_t>(0, prefix - first), count = stable + int64_t(nodes.size());
  memory.scores.resize(HEADS * (count + LANES));
  float* score = memory.scores.data();
  const Seen row{first, stable, nodes.data()};
  for (int64_t g = 0; g < group;) {
    int64_t heads = std::min(HEADS, group - g);
    const T* query = q + g * head_stride;
    T* result = out + g * s.size;
#define EAGLE_HEADS(C, G) \
  attend_heads<T, C, G>(query, head_stride, keys, values, count, row, s.scale, s.softcap, score, result)
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
          attend_head<T>(query + i * head_stride, keys, values, count, row, s.scale, s.softcap, score, s.size,
                         result + i * s.size);
    }
#undef EAGLE_SIZE
#undef EAGLE_HEADS
    g += heads;
  }
}

// Rows first .. first + count - 1, of one slot or of none.
struct RowRun {
  int64_t first, count;
};

// The rows of a forward, in runs that attend together.
template <typename T>
std::vector<RowRun> row_runs(const int64_t* places, const Shape& s) {
  int64_t most = 1;
#if EAGLE_TILES
  int64_t group = s.heads / s.kv_heads;
  if (sizeof(T) == 2 && TileAttention::takes(s.size, group, s.scale)) most = LANES / group;
#endif
  std::vector<RowRun> runs;
  for (int64_t m = 0; m < s.rows; ++m) {
    if (!runs.empty() && runs.back().count < most && places[runs.back().first * 4] == places[m * 4]) ++runs.back().count;
    else runs.push_back({m, 1});
  }
  return runs;
}

// The rows of a run and the h-th key head: queries at q, their results at out; by strides between rows and between heads.
template <typename T>
void attend_run(const T* q, int64_t row_stride, int64_t head_stride, const char* keys, const char* values,
                const int64_t* strides, const int64_t* places, const RowRun& run, int64_t h, const Shape& s, T* out,
                AttendMemory& memory) {
  const int64_t group = s.heads / s.kv_heads, out_stride = s.heads * s.size, *place = places + run.first * 4;
  q += run.first * row_stride + h * group * head_stride;
  out += run.first * out_stride + h * group * s.size;
  if (place[0] < 0) {
    for (int64_t m = 0; m < run.count; ++m) std::memset((void*)(out + m * out_stride), 0, group * s.size * sizeof(T));
    return;
  }
  const int64_t at = place[0] * strides[0] + h * strides[1];
  const T *k = (const T*)keys + at, *v = (const T*)values + at;
#if EAGLE_TILES
  if constexpr (sizeof(T) == 2)
    if (TileAttention::takes(s.size, group, s.scale))
      return TileAttention(place, run.count, group, s.size, s.window, s.scale, s.softcap, memory)(
          q, row_stride, head_stride, k, v, out, out_stride);
#endif
  for (int64_t m = 0; m < run.count; ++m)
    attend_row<T>(q + m * row_stride, head_stride, k, v, place + m * 4, s, out + m * out_stride, memory);
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
  const std::vector<RowRun> runs = row_runs<T>(places, s);
  const int64_t count = runs.size(), strides[] = {cache.slot, cache.head};
  at::parallel_for(0, count * s.kv_heads, 1, [&](int64_t begin, int64_t end) {
    AttendMemory memory;
    for (int64_t task = begin; task < end; ++task)
      attend_run<T>(qs, q.stride(2), q.stride(1), cache.keys, cache.values, strides, places, runs[task % count], task / count,
                    s, out, memory);
  });
}

// q [1, Hq, M, D], k and v [1, Hkv, M, D]: stores keys and values in their slots, and attends: [1, M, Hq, D].
inline Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& places, const Tensor& cache,
                     int64_t layer, double scale, int64_t window, double softcap) {
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

}  // namespace eagle
