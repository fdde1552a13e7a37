// Attention by tiles: rows of one slot read its keys and values together, sixteen queries at a time.
//
// Keys are taken in blocks of 32 positions, counted from the sequence's first. A row's sums run over these blocks, so that
// neither the rows beside it nor the cache rows in which its tree lies are seen in its bits; what it does not see of a
// block is left out. Blocks that all rows see whole are read where they are, once for all; those that a window cuts and the
// few behind the prefix are taken for each row by itself.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "numbers.h"
#include "tiles.h"

namespace eagle {

struct alignas(64) TileWords {
  uint32_t at[TILE_ROWS][LANES];
};

// What is read next, fetched into L2 piece by piece: memory would idle while a thread attends.
struct ReadNext {
  const char *at = nullptr, *end = nullptr;

  void fetch(int64_t bytes) {
    for (const char* until = std::min(end, at + bytes); at < until; at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// Memory of a thread that attends.
struct AttendMemory {
  ReadNext next;
  std::vector<int64_t> path;
  std::vector<float> scores;
  std::vector<TileWords> queries, weights, block;
};

#if EAGLE_TILES
constexpr int64_t KEYS = TILE_DEPTH;  // in a block

// 16 x 16 words, turned over.
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // 128 bits of r[4 j + i] are rows 4 j .. 4 j + 3 of one column
    __m512i even = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), odd = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    __m512i even2 = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88), odd2 = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    t[i] = _mm512_shuffle_i32x4(even, even2, 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
    t[8 + i] = _mm512_shuffle_i32x4(even, even2, 0xdd);
    t[12 + i] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// 2^x for x <= 0, to some 3e-6 of it, as weights are rounded to bf16; 0 below 2^-125, short of numbers that are slow.
inline f32x16 power_of_two(f32x16 x) {
  __m512 v = (__m512)x, n = _mm512_roundscale_ps(v, 0);
  f32x16 r = (f32x16)_mm512_sub_ps(v, n), p = f32x16{} + 9.6003955e-3f;
  for (float next : {5.5916894e-2f, 2.4023718e-1f, 6.9312199e-1f, 1.0f}) p = fused(p, r, f32x16{} + next);
  __mmask16 some = _mm512_cmp_ps_mask(v, _mm512_set1_ps(-125.0f), _CMP_NLE_UQ);  // what is no number stays none
  return (f32x16)_mm512_maskz_scalef_ps(some, (__m512)p, n);
}

// Attention of a run of rows, `group` query heads each, over the keys and values [.., D] of their slot and group of heads.
class TileAttention {
 public:
  // Whether heads can go by tiles; where they can they always do, as the bits are others.
  static bool takes(int64_t size, int64_t group, float scale) {
    return size % KEYS == 0 && group <= LANES && scale > 0 && tiles_granted();
  }

  // places [count, 4]: slot, cache row, stable prefix and ancestor word of each row.
  TileAttention(const int64_t* places, int64_t count, int64_t group, int64_t size, int64_t window, float scale, float softcap,
                AttendMemory& memory)
      : places_(places), count_(count), group_(group), size_(size), window_(window), scale_(scale), softcap_(softcap),
        memory_(memory) {
    int64_t first = INT64_MAX, hidden = 0, stable = INT64_MAX, last = 0;
    for (int64_t m = 0; m < count; ++m) {
      first = std::min(first, first_seen(m));
      hidden = std::max(hidden, first_seen(m));
      stable = std::min(stable, prefix(m));
      last = std::max(last, position(m));
    }
    begin_ = first / KEYS;
    own_ = std::max(begin_, stable / KEYS);
    whole_ = std::min(own_, (hidden + KEYS - 1) / KEYS);
    end_ = last / KEYS + 1;
    memory.queries.resize(size / KEYS);
    memory.weights.resize(2 * (end_ - begin_));
    memory.block.resize(2 * (size / LANES));
  }

  // Strides of q between rows and between heads, of out between rows.
  void operator()(const uint16_t* q, int64_t row_stride, int64_t head_stride, const uint16_t* keys, const uint16_t* values,
                  uint16_t* out, int64_t out_stride) {
    Tiles tiles;
    tiles.shape(TILE_ROWS);
    take_queries(q, row_stride, head_stride);
    for (int64_t b = begin_; b < own_; ++b) {
      score(keys + b * KEYS * size_, weights(b));
      memory_.next.fetch(PIECE);
    }
    if (own_ < end_) score_own(keys);
    if (window_) hide_what_lies_before();
    f32x16 totals = exponentials();
    for (int64_t d = 0; d < size_; d += 2 * KEYS) {
      if (size_ - d >= 2 * KEYS) add_values<4>(values + d, totals, out + d, out_stride);
      else add_values<2>(values + d, totals, out + d, out_stride);
    }
  }

 private:
  static constexpr int64_t PIECE = 1024;  // bytes to fetch at each of three looks at a block
  static constexpr float NONE = -std::numeric_limits<float>::infinity();

  int64_t prefix(int64_t m) const { return places_[m * 4 + 2]; }
  uint64_t word(int64_t m) const { return uint64_t(places_[m * 4 + 3]); }
  int64_t position(int64_t m) const { return prefix(m) + std::popcount(word(m)) - 1; }
  int64_t first_seen(int64_t m) const { return window_ ? std::max<int64_t>(0, position(m) - window_ + 1) : 0; }

  // Of a block, by key and query: first scores [32, 16] in fp32, then weights [16, 32] in bf16, in half of it.
  float* weights(int64_t block) { return (float*)memory_.weights[2 * (block - begin_)].at; }
  __mmask16 lanes(int64_t m) const { return __mmask16(((1u << group_) - 1) << (m * group_)); }

  // The queries, turned over: pairs of entries by query.
  void take_queries(const uint16_t* q, int64_t row_stride, int64_t head_stride) {
    for (int64_t part = 0; part < size_ / KEYS; ++part) {
      __m512i r[16];
      for (int64_t i = 0; i < LANES; ++i)
        r[i] = i < count_ * group_
                   ? _mm512_loadu_si512(q + i / group_ * row_stride + i % group_ * head_stride + part * KEYS)
                   : _mm512_setzero_si512();
      transpose(r);
      for (int64_t i = 0; i < LANES; ++i) _mm512_store_si512(memory_.queries[part].at[i], r[i]);
    }
  }

  // Keys [32, D] times all queries.
  void score(const uint16_t* keys, float* out) const {
    asm volatile("" ::: "memory");  // the compiler is not told that tiles are read from memory
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t part = 0; part < size_ / KEYS; ++part) {
      _tile_loadd(5, memory_.queries[part].at, 64);
      _tile_loadd(4, keys + part * KEYS, size_ * 2);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, keys + TILE_ROWS * size_ + part * KEYS, size_ * 2);
      _tile_dpbf16ps(1, 6, 5);
    }
    _tile_stored(0, out, 64);
    _tile_stored(1, out + TILE_ROWS * LANES, 64);
    if (softcap_ != 0)
      for (int64_t i = 0; i < KEYS * LANES; ++i) out[i] = softcap_ * std::tanh(out[i] * scale_ / softcap_);
  }

  // Calls use(block, rows of the cache, how many) for each block that row m has to itself.
  template <typename F>
  void for_own(int64_t m, const F& use) {
    std::vector<int64_t>& path = memory_.path;
    path.clear();
    int64_t first = own_ * KEYS, stable = prefix(m);
    for (int64_t t = first; t < stable; ++t) path.push_back(t);
    for (uint64_t left = word(m), t = stable; left; left &= left - 1, ++t)
      if (int64_t(t) >= first) path.push_back(stable + std::countr_zero(left));
    for (int64_t i = 0; i < int64_t(path.size()); i += KEYS)
      use(own_ + i / KEYS, path.data() + i, std::min<int64_t>(KEYS, path.size() - i));
  }

  void score_own(const uint16_t* keys) {
    std::fill(weights(own_), weights(own_) + (end_ - own_) * KEYS * LANES, NONE);
    uint16_t* block = (uint16_t*)memory_.block.data();
    alignas(64) float all[KEYS * LANES];
    for (int64_t m = 0; m < count_; ++m)
      for_own(m, [&](int64_t b, const int64_t* rows, int64_t count) {
        for (int64_t t = 0; t < count; ++t) std::memcpy(block + t * size_, keys + rows[t] * size_, size_ * 2);
        score(block, all);
        for (int64_t t = 0; t < count; ++t)
          _mm512_mask_store_ps(weights(b) + t * LANES, lanes(m), _mm512_load_ps(all + t * LANES));
      });
  }

  void hide_what_lies_before() {
    for (int64_t m = 0; m < count_; ++m)
      for (int64_t t = begin_ * KEYS; t < first_seen(m); ++t)
        _mm512_mask_store_ps(weights(begin_) + (t - begin_ * KEYS) * LANES, lanes(m), _mm512_set1_ps(NONE));
  }

  // Scores become weights, e^(score - highest), turned over to queries by pairs of keys; returns their sums.
  f32x16 exponentials() {
    const int64_t keys = (end_ - begin_) * KEYS;
    const float* score = weights(begin_);
    f32x16 tops[4];
    for (f32x16& top : tops) top = f32x16{} + NONE;
    for (int64_t t = 0; t < keys; t += 4)
      for (int64_t i = 0; i < 4; ++i) {
        f32x16 here = load16(score + (t + i) * LANES);
        tops[i] = here > tops[i] ? here : tops[i];
      }
    f32x16 top = tops[0];
    for (f32x16 other : tops) top = other > top ? other : top;
    const f32x16 factor = f32x16{} + 1.44269504f * (softcap_ != 0 ? 1.0f : scale_);
    f32x16 sums[4] = {};
    const __m512i pairs = _mm512_load_si512(PAIRS);
    for (int64_t b = begin_; b < end_; ++b) {
      float* here = weights(b);
      __m512i r[16];
#pragma GCC unroll 2
      for (int64_t pair = 0; pair < KEYS / 2; ++pair) {
        f32x16 e[2];
        for (int64_t i = 0; i < 2; ++i) {
          e[i] = power_of_two((load16(here + (2 * pair + i) * LANES) - top) * factor);
          sums[pair % 2 * 2 + i] += e[i];
        }
        r[pair] = _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh((__m512)e[1], (__m512)e[0]));
      }
      memory_.next.fetch(PIECE);
      transpose(r);
      for (int64_t i = 0; i < LANES; ++i) _mm512_store_si512(here + i * LANES, r[i]);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  // Values of 32 keys, pairs of keys by N * 16 entries, each 32 entries in two tiles: of eight in turn the first four, and the last.
  template <int N, typename F>
  void interleave(TileWords* out, const F& row) const {
    for (int64_t pair = 0; pair < KEYS / 2; ++pair) {
      const uint16_t *even = row(2 * pair), *odd = row(2 * pair + 1);
      for (int64_t i = 0; i < N / 2; ++i) {
        __m512i a = even ? _mm512_loadu_si512(even + i * KEYS) : _mm512_setzero_si512();
        __m512i b = odd ? _mm512_loadu_si512(odd + i * KEYS) : _mm512_setzero_si512();
        _mm512_store_si512(out[2 * i].at[pair], _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(out[2 * i + 1].at[pair], _mm512_unpackhi_epi16(a, b));
      }
    }
  }

  template <int N>
  static void load_sums(const TileWords* sums) {
    asm volatile("" ::: "memory");  // the compiler is not told that they are read
    _tile_loadd(0, sums[0].at, 64);
    _tile_loadd(1, sums[1].at, 64);
    if constexpr (N == 4) {
      _tile_loadd(2, sums[2].at, 64);
      _tile_loadd(3, sums[3].at, 64);
    }
  }

  template <int N>
  static void store_sums(TileWords* sums) {
    _tile_stored(0, sums[0].at, 64);
    _tile_stored(1, sums[1].at, 64);
    if constexpr (N == 4) {
      _tile_stored(2, sums[2].at, 64);
      _tile_stored(3, sums[3].at, 64);
    }
  }

  template <int N>
  static void add_block(const void* weights, const TileWords* values) {
    asm volatile("" ::: "memory");  // as there
    _tile_loadd(4, weights, 64);
    _tile_loadd(5, values[0].at, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, values[1].at, 64);
    _tile_dpbf16ps(1, 4, 6);
    if constexpr (N == 4) {
      _tile_loadd(7, values[2].at, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, values[3].at, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }

  // N * 16 entries of all rows: their values by weight.
  template <int N>
  void add_values(const uint16_t* values, f32x16 totals, uint16_t* out, int64_t out_stride) {
    TileWords* turns[] = {memory_.block.data(), memory_.block.data() + N};
    TileWords sums[N] = {}, mine[N];
    // What a row does not see may be infinite or no number, and 0 times that is no number: so it is left out, and where rows
    // see different keys each keeps its own part of the sums.
    auto keep = [&](int64_t m) {
      store_sums<N>(mine);
      for (int i = 0; i < N; ++i) std::memcpy(sums[i].at[m * group_], mine[i].at[m * group_], group_ * 64);
    };
    for (int64_t m = 0; m < count_ && begin_ < whole_; ++m) {
      load_sums<N>(sums);
      for (int64_t b = first_seen(m) / KEYS; b < whole_; ++b) {
        interleave<N>(turns[b % 2], [&](int64_t t) {
          return b * KEYS + t < first_seen(m) ? nullptr : values + (b * KEYS + t) * size_;
        });
        add_block<N>(weights(b), turns[b % 2]);
      }
      keep(m);
    }
    load_sums<N>(sums);
    for (int64_t b = whole_; b < own_; ++b) {
      memory_.next.fetch(PIECE);
      const uint16_t* here = values + b * KEYS * size_;
      interleave<N>(turns[b % 2], [&](int64_t t) { return here + t * size_; });
      if (b > whole_) add_block<N>(weights(b - 1), turns[(b - 1) % 2]);
    }
    if (own_ > whole_) add_block<N>(weights(own_ - 1), turns[(own_ - 1) % 2]);
    store_sums<N>(sums);
    for (int64_t m = 0; m < count_; ++m) {
      load_sums<N>(sums);
      for_own(m, [&](int64_t b, const int64_t* rows, int64_t count) {
        interleave<N>(turns[b % 2], [&](int64_t t) {
          return t < count && b * KEYS + t >= first_seen(m) ? values + rows[t] * size_ : nullptr;
        });
        add_block<N>(weights(b), turns[b % 2]);
      });
      keep(m);
    }
    const __m512i low = _mm512_load_si512(LOW), high = _mm512_load_si512(HIGH);
    for (int64_t i = 0; i < count_ * group_; ++i) {
      const float part = 1.0f / totals[i];
      uint16_t* to = out + i / group_ * out_stride + i % group_ * size_;
      for (int64_t pair = 0; pair < N / 2; ++pair) {
        __m512 a = _mm512_load_ps(sums[2 * pair].at[i]), b = _mm512_load_ps(sums[2 * pair + 1].at[i]);
        store(to + pair * KEYS, (f32x16)_mm512_permutex2var_ps(a, low, b) * part, LANES);
        store(to + pair * KEYS + LANES, (f32x16)_mm512_permutex2var_ps(a, high, b) * part, LANES);
      }
    }
  }

  alignas(64) static constexpr uint16_t PAIRS[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  alignas(64) static constexpr uint32_t LOW[16] = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
  alignas(64) static constexpr uint32_t HIGH[16] = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};

  const int64_t* places_;
  int64_t count_, group_, size_, window_;
  float scale_, softcap_;
  AttendMemory& memory_;
  // Blocks that are seen, from where on all rows see whole ones, and where those begin that each row gathers for itself.
  int64_t begin_, whole_, own_, end_;
};
#endif

}  // namespace eagle
