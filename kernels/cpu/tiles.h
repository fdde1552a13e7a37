// Products of matrices by a core's tiles (Intel AMX), where it has them: sixteen rows cost what one does.
//
// A row's result has the same bits however many rows are beside it: a tile's rows do not meet, and its sums run over the
// inputs in one order. They are not the bits of other instructions, so what can go by tiles always does.
#pragma once

#include <cstdint>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define EAGLE_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define EAGLE_TILES 0
#endif

#include "numbers.h"

namespace eagle {

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_DEPTH = 32;  // bf16 inputs that a tile takes in

#if EAGLE_TILES
// Whether the kernel lets this process use the tiles' registers, which it must be asked for.
inline bool tiles_granted() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return granted;
}

// The shapes of a thread's tiles, as long as this lives. 0 to 3: sums of up to 16 rows and 16 outputs; 4: inputs; 5 to 7: weights.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() {
    if (rows_) _tile_release();
  }
  void shape(int64_t rows) {
    if (rows == rows_) return;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, none[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int t = 0; t < 8; ++t) config.bytes[t] = 64, config.rows[t] = t < 5 ? uint8_t(rows) : 16;
    asm volatile("" ::: "memory");  // the compiler is not told that all of it is read
    _tile_loadconfig(&config);
    rows_ = rows;
  }

 private:
  int64_t rows_ = 0;
};

// `rows` rows of x, up to 16, times a packed block of 64 outputs, to sums [rows, 64]. Every step fetches `piece` bytes from
// `next` on, into L1 or (2) L2.
template <int LEVEL>
void multiply_tiles(const uint16_t* x, int64_t stride, const uint16_t* w, int64_t width, float* sums, const char* next,
                    int64_t piece) {
  asm volatile("" ::: "memory");  // the compiler is not told that tiles are read from memory
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  constexpr int64_t OUTPUTS = 4 * LANES, PAIRS = OUTPUTS * 4;  // bytes of a pair of inputs of all outputs
  for (int64_t k = 0; k < width; k += TILE_DEPTH) {
    for (int64_t byte = 0; byte < piece; byte += 64) __builtin_prefetch(next + byte, 0, 4 - LEVEL);
    next += piece;
    const uint16_t* here = w + k * OUTPUTS;
    _tile_loadd(4, x + k, stride * 2);
    _tile_loadd(5, here, PAIRS);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, here + 2 * LANES, PAIRS);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, here + 4 * LANES, PAIRS);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, here + 6 * LANES, PAIRS);
    _tile_dpbf16ps(3, 4, 5);
  }
  constexpr int64_t ROW = OUTPUTS * sizeof(float);
  _tile_stored(0, sums, ROW);
  _tile_stored(1, sums + LANES, ROW);
  _tile_stored(2, sums + 2 * LANES, ROW);
  _tile_stored(3, sums + 3 * LANES, ROW);
}
#endif

}  // namespace eagle
