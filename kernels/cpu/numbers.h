// Vectors of fp32, bf16 as 16-bit words, and e^x.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace eagle {

constexpr int64_t LANES = 16;  // outputs in a vector of fp32

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

inline float widen(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  return std::bit_cast<float>(bits);
}

inline uint16_t narrow(float x) {  // to nearest, ties to even
  uint32_t bits = std::bit_cast<uint32_t>(x);
  uint32_t even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 | 64) : even);  // what is no number stays none
}

inline float as_float(uint16_t x) { return widen(x); }
inline float as_float(float x) { return x; }
inline void put(uint16_t* out, float x) { *out = narrow(x); }
inline void put(float* out, float x) { *out = x; }

inline f32x16 load16(const float* x) {
  f32x16 v;
  std::memcpy(&v, x, 64);
  return v;
}
inline f32x16 load16(const uint16_t* x) {
  u16x16 half;
  std::memcpy(&half, x, 32);
  return std::bit_cast<f32x16>(__builtin_convertvector(half, u32x16) << 16);
}

// The same for each lane.
inline u16x16 narrow(f32x16 x) {
  u32x16 bits = std::bit_cast<u32x16>(x), even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 | 64) : even, u16x16);
}

inline void store16(float* out, f32x16 v) { std::memcpy(out, &v, 64); }
inline void store16(uint16_t* out, f32x16 v) {
  u16x16 half = narrow(v);
  std::memcpy(out, &half, 32);
}

// The first `count` lanes.
template <typename T>
void store(T* out, f32x16 v, int64_t count) {
  if (count == LANES) return store16(out, v);
  for (int64_t i = 0; i < count; ++i) put(out + i, v[i]);
}

// a * b + c, rounded once where the machine can.
inline f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  for (int64_t lane = 0; lane < LANES; ++lane) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return c;
#else
  return a * b + c;
#endif
}

inline float rounded(float x, const uint16_t*) { return widen(narrow(x)); }
inline float rounded(float x, const float*) { return x; }
inline f32x16 rounded(f32x16 x, const uint16_t*) {
  return std::bit_cast<f32x16>(__builtin_convertvector(narrow(x), u32x16) << 16);
}
inline f32x16 rounded(f32x16 x, const float*) { return x; }

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

// The same of each lane, fused.
inline f32x16 exponential(f32x16 x) {
  typedef int32_t i32x16 __attribute__((vector_size(64)));
  x = x > -87.0f ? x : f32x16{} - 87.0f;
  f32x16 n = fused(x, f32x16{} + 1.44269504f, f32x16{} + 12582912.0f) - 12582912.0f;
  f32x16 r = fused(n, f32x16{} + 2.12194440e-4f, fused(n, f32x16{} - 0.693359375f, x));
  f32x16 p = f32x16{} + 1.9875691500e-4f;
  for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fused(p, r, f32x16{} + next);
  p = fused(p * r, r, r) + 1.0f;
  return p * std::bit_cast<f32x16>((__builtin_convertvector(n, i32x16) + 127) << 23);
}

// The greatest lane.
inline float highest(f32x16 v) {
  float top = v[0];
  for (int64_t i = 1; i < LANES; ++i) top = v[i] > top ? v[i] : top;
  return top;
}

inline bool any_above(f32x16 v, float floor) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(floor), _CMP_GT_OQ) != 0;
#else
  bool any = false;
  for (int64_t i = 0; i < LANES; ++i) any |= v[i] > floor;
  return any;
#endif
}

// The first lane that equals x, LANES where none does.
inline int64_t lane_of(f32x16 v, float x) {
#if defined(__AVX512F__)
  unsigned same = _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(x), _CMP_EQ_OQ);
  return std::countr_zero(same | 1u << LANES);
#else
  int64_t lane = 0;
  while (lane < LANES && v[lane] != x) ++lane;
  return lane;
#endif
}

// The index of the first maximum of a row; NaN counts as -inf.
template <typename T>
int64_t first_maximum(const T* row, int64_t width) {
  constexpr int64_t CHAINS = 4;  // maxima that do not wait for each other
  f32x16 tops[CHAINS];
  for (f32x16& top : tops) top = f32x16{} - std::numeric_limits<float>::infinity();
  int64_t i = 0;
  for (; i + CHAINS * LANES <= width; i += CHAINS * LANES)
    for (int64_t chain = 0; chain < CHAINS; ++chain) {
      f32x16 v = load16(row + i + chain * LANES);
      tops[chain] = v > tops[chain] ? v : tops[chain];
    }
  float most = -std::numeric_limits<float>::infinity();
  for (f32x16 top : tops) most = std::max(most, highest(top));
  for (; i < width; ++i) most = std::max(most, as_float(row[i]));
  if (most == -std::numeric_limits<float>::infinity()) return 0;
  for (i = 0; i + LANES <= width; i += LANES)
    if (int64_t lane = lane_of(load16(row + i), most); lane < LANES) return i + lane;
  for (; i < width; ++i)
    if (as_float(row[i]) == most) return i;
  return 0;
}

}  // namespace eagle
