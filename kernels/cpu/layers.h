// Whole decoder layers of Llama's kind, and the norm that stands alone behind them.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/narrow.h>

#include <array>
#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include <omp.h>
#include <torch/custom_class.h>

#include "attend.h"
#include "coarse.h"
#include "compact.h"
#include "linear.h"
#include "meeting.h"

namespace eagle {

// `multiply_blocks`, shared among the threads of a parallel region; all have ended when it returns.
template <typename T, typename F>
void share_blocks(Meeting& meeting, const T* x, int64_t rows, int64_t width, const void* packed, bool coarse, const T* bias,
                  int64_t outputs, std::vector<T>& local, const F& use) {
  int64_t blocks = (outputs + BLOCK - 1) / BLOCK, thread = omp_get_thread_num(), threads = omp_get_num_threads();
  int64_t begin = blocks * thread / threads, end = blocks * (thread + 1) / threads;
  if (coarse)
    multiply_coarse_blocks(x, rows, width, (const char*)packed, bias, outputs, begin, end, local, use);
  else
    multiply_blocks(x, rows, width, (const T*)packed, bias, outputs, begin, end, local, use);
  meeting.wait();
}

// The weights that `share_blocks` will have this thread read.
template <typename T>
ReadNext share_of(const void* packed, int64_t width, int64_t outputs) {
  int64_t blocks = (outputs + BLOCK - 1) / BLOCK, thread = omp_get_thread_num(), threads = omp_get_num_threads();
  auto from = [&](int64_t i) { return (const char*)packed + blocks * i / threads * width * BLOCK * int64_t(sizeof(T)); };
  return {from(thread), from(thread + 1)};
}

struct Norm {
  float eps;
  // 0: rounded, then times weight (Llama); 1: times (1 + weight), then rounded (Gemma); 2: times weight, then rounded
  int64_t kind;
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
inline Tensor norm(const Tensor& input, const Tensor& weight, double eps, int64_t kind) {
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
  const int64_t half = turned / 2;
  T *low = head, *high = head + half;
  if (full) {
    const float *c = (const float*)cos, *s = (const float*)sin;
#pragma GCC ivdep
    for (int64_t i = 0; i < half; ++i) {
      float a = as_float(low[i]), b = as_float(high[i]);
      put(low + i, a * c[i] - b * s[i]);
      put(high + i, b * c[i + half] + a * s[i + half]);
    }
  } else {
    const T *c = (const T*)cos, *s = (const T*)sin;
#pragma GCC ivdep
    for (int64_t i = 0; i < half; ++i) {
      float a = as_float(low[i]), b = as_float(high[i]);
      put(low + i, rounded(a * as_float(c[i]), head) - rounded(b * as_float(s[i]), head));
      put(high + i, rounded(b * as_float(c[i + half]), head) + rounded(a * as_float(s[i + half]), head));
    }
  }
}

// x / (1 + e^-x), of a number or of each lane.
template <typename V>
V silu(V x) {
  V e = exponential(x < 0 ? x : -x);
  return x * (x < 0 ? e : V{} + 1.0f) / (1.0f + e);
}

// GELU by tanh, and tanh z = 2 sigmoid(2z) - 1.
template <typename V>
V gelu(V x) {
  V z = 1.5957691216f * (x + 0.044715f * x * x * x), e = exponential(z < 0 ? z : -z);
  return x * (z < 0 ? e : V{} + 1.0f) / (1.0f + e);
}

template <typename T>
void activate(const T* gate, const T* up, int64_t count, bool is_gelu, T* out) {
  auto of = [&](auto x) { return rounded(is_gelu ? gelu(x) : silu(x), gate); };
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store16(out + i, of(load16(gate + i)) * load16(up + i));
  for (; i < count; ++i) put(out + i, of(as_float(gate[i])) * as_float(up[i]));
}

template <typename T>
void add_into(T* x, const T* added, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store16(x + i, load16(x + i) + load16(added + i));
  for (; i < count; ++i) put(x + i, as_float(x[i]) + as_float(added[i]));
}

enum LayerTensor {
  NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, OUT_BIAS, POST_NORM, MLP_NORM, GATE_UP, DOWN, POST_MLP_NORM, TENSORS
};

// A stack of decoder layers. It keeps the addresses of its weights together: handed over as tensors with every forward, they
// would each cost a few misses of caches that the forward before has emptied.
struct Layers : torch::CustomClassHolder {
  std::vector<Tensor> weights;                        // of each layer, in the order of LayerTensor; empty where it has none
  std::vector<std::array<const void*, TENSORS>> at;
  std::vector<int64_t> kinds;                         // of each layer: which rotary embedding, and the window or 0
  int64_t heads, kv_heads, size, inner, activation;
  float scale, softcap;
  Norm norm;
  bool coarse;                                        // whether matrices are in 8 bits, see coarse.h

  Layers(std::vector<Tensor> tensors, std::vector<int64_t> ropes_and_windows, std::vector<int64_t> sizes, double scale,
         double softcap, double eps, int64_t norms)
      : weights(std::move(tensors)), kinds(std::move(ropes_and_windows)), scale(float(scale)), softcap(float(softcap)),
        norm{float(eps), norms} {
    TORCH_CHECK(sizes.size() == 5 && weights.size() * 2 == kinds.size() * TENSORS, "sizes or tensors are missing");
    heads = sizes[0], kv_heads = sizes[1], size = sizes[2], inner = sizes[3], activation = sizes[4];
    at.resize(depth());
    coarse = !weights.empty() && is_coarse(weights[QKV]);
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i] = weights[i].contiguous();
      at[i / TENSORS][i % TENSORS] = weights[i].numel() ? weights[i].const_data_ptr() : nullptr;
    }
  }

  int64_t depth() const { return kinds.size() / 2; }
};

// Decoder layers of Llama's kind over rows [M, h]; see stages/targets/cpu_layers.py.
template <typename T>
void run_layers(const Layers& stack, Tensor& x, const std::optional<Tensor>& input, const Tensor& places,
                const Tensor& positions, const Tensor& cache, const Tensor& cos, const Tensor& sin, at::TensorList taps,
                at::IntArrayRef tapped) {
  int64_t rows = x.size(0), width = x.size(1), heads = stack.heads, kv_heads = stack.kv_heads, size = stack.size;
  int64_t inner = stack.inner, turned = cos.size(-1), depth = stack.depth();
  const Norm& norm = stack.norm;
  int64_t all_heads = heads + 2 * kv_heads;
  bool full = cos.scalar_type() == at::kFloat && sizeof(T) == 2;
  const int64_t *where = cache.const_data_ptr<int64_t>(), *place = places.const_data_ptr<int64_t>();
  const int64_t* position = positions.const_data_ptr<int64_t>();
  Tensor normed = at::empty({rows, width}, x.options()), qkv = at::empty({rows, all_heads * size}, x.options());
  Tensor seen = at::empty({rows, heads * size}, x.options()), gated = at::empty({rows, inner}, x.options());
  Tensor added = at::empty({rows, width}, x.options());
  T *xs = (T*)x.mutable_data_ptr(), *ns = (T*)normed.mutable_data_ptr(), *qs = (T*)qkv.mutable_data_ptr();
  T *as = (T*)seen.mutable_data_ptr(), *gs = (T*)gated.mutable_data_ptr(), *os = (T*)added.mutable_data_ptr();
  auto data = [&](int64_t layer, int which) { return (const T*)stack.at[layer][which]; };  // null where it has none
  const char *cosines = (const char*)cos.const_data_ptr(), *sines = (const char*)sin.const_data_ptr();
  const int64_t bytes = sizeof(T), cos_row = turned * cos.element_size(), cos_kind = cos.size(1) * cos_row;
  const int threads = at::get_num_threads();
  Meeting& meeting = Meeting::of_caller(threads);
  const std::vector<RowRun> runs = row_runs<T>(place, {rows, heads, kv_heads, size, stack.scale});
  const int64_t together = runs.size();
#pragma omp parallel num_threads(threads)
  {
    std::vector<T> local;
    AttendMemory memory;
    // x += what a layer adds, of blocks or, behind a norm of its own, of whole rows
    auto add_to = [&](int64_t layer, int post, const T* in, int64_t in_width, int which, const T* bias) {
      bool later = data(layer, post);
      share_blocks<T>(meeting, in, rows, in_width, stack.at[layer][which], stack.coarse, bias, width, local,
                      [&](int64_t first, const T* out, int64_t stride, int64_t count) {
                        for (int64_t m = 0; m < rows; ++m)
                          if (later) std::memcpy(os + m * width + first, out + m * stride, count * bytes);
                          else add_into(xs + m * width + first, out + m * stride, count);
                      });
      if (!later) return;
      share(meeting, rows, [&](int64_t m) {
        rms_norm<T>(os + m * width, data(layer, post), width, norm, os + m * width);
        add_into(xs + m * width, os + m * width, width);
      });
    };
    for (int64_t layer = 0; layer < depth; ++layer) {
      int64_t rope = stack.kinds[layer * 2], window = stack.kinds[layer * 2 + 1];
      for (size_t t = 0; t < tapped.size(); ++t)
        if (tapped[t] == layer) {
          T* out = (T*)taps[t].mutable_data_ptr();
          int64_t stride = taps[t].stride(0);
          share(meeting, rows, [&](int64_t m) { std::memcpy(out + m * stride, xs + m * width, width * bytes); });
        }
      bool given = input && layer == 0;
      if (!given)
        share(meeting, rows, [&](int64_t m) { rms_norm<T>(xs + m * width, data(layer, NORM), width, norm, ns + m * width); });
      const T* entry = given ? (const T*)input->const_data_ptr() : ns;
      share_blocks<T>(meeting, entry, rows, given ? input->size(1) : width, stack.at[layer][QKV], stack.coarse,
                      data(layer, QKV_BIAS), all_heads * size, local,
                      [&](int64_t first, const T* out, int64_t stride, int64_t count) {
                        for (int64_t m = 0; m < rows; ++m)
                          std::memcpy(qs + m * all_heads * size + first, out + m * stride, count * bytes);
                      });
      char* keys = (char*)where[0] + layer * where[2] * bytes;
      char* values = (char*)where[1] + layer * where[2] * bytes;
      share(meeting, rows * (heads + kv_heads), [&](int64_t task) {
        int64_t m = task / (heads + kv_heads), h = task % (heads + kv_heads);
        T* head = qs + (m * all_heads + h) * size;
        const int64_t* p = place + m * 4;
        if (p[0] < 0) return;
        int which = h < heads ? Q_NORM : K_NORM;
        if (data(layer, which)) rms_norm<T>(head, data(layer, which), size, norm, head);
        int64_t angle = rope * cos_kind + position[m] * cos_row;
        if (rope >= 0)
          rotate<T>(head, cosines + angle, sines + angle, full, turned);
        if (h < heads) return;
        int64_t at = p[0] * where[3] + (h - heads) * where[4] + p[1] * size;
        std::memcpy((T*)keys + at, head, size * bytes);
        std::memcpy((T*)values + at, head + kv_heads * size, size * bytes);
      });
      Shape shape{rows, heads, kv_heads, size, stack.scale, window, stack.softcap};
      if (!stack.coarse) memory.next = share_of<T>(stack.at[layer][OUT], heads * size, width);
      share(meeting, together * kv_heads, [&](int64_t task) {
        attend_run<T>(qs, all_heads * size, size, keys, values, where + 3, place, runs[task % together], task / together, shape,
                      as, memory);
      });
      add_to(layer, POST_NORM, as, heads * size, OUT, data(layer, OUT_BIAS));
      share(meeting, rows, [&](int64_t m) { rms_norm<T>(xs + m * width, data(layer, MLP_NORM), width, norm, ns + m * width); });
      // Gate and up are packed in turns of 32, so that a block has both halves of its products.
      share_blocks<T>(meeting, ns, rows, width, stack.at[layer][GATE_UP], stack.coarse, (const T*)nullptr, 2 * inner, local,
                      [&](int64_t first, const T* out, int64_t stride, int64_t count) {
                        for (int64_t m = 0; m < rows; ++m)
                          for (int64_t b = 0; b < count; b += BLOCK) {
                            const T* gate = out + m * stride + b;
                            int64_t half = std::min(BLOCK, count - b) / 2;
                            activate(gate, gate + half, half, stack.activation == 1, gs + m * inner + (first + b) / 2);
                          }
                      });
      add_to(layer, POST_MLP_NORM, gs, inner, DOWN, nullptr);
    }
  }
}

// States [M, h] behind the layers of states before them; `input` [M, K] stands for the first layer's normed x. Rotations are
// looked up by position in cos and sin [R, positions, D'].
inline Tensor layers(const c10::intrusive_ptr<Layers>& stack, const Tensor& states, const std::optional<Tensor>& input,
                     const Tensor& places, const Tensor& positions, const Tensor& cache, const Tensor& cos, const Tensor& sin,
                     const Tensor& features, at::IntArrayRef tapped) {
  Tensor x = states.clone(at::MemoryFormat::Contiguous), at = positions.contiguous(), where = places.contiguous();
  for (int64_t m = 0; m < at.numel(); ++m) {
    int64_t position = at.const_data_ptr<int64_t>()[m];
    TORCH_CHECK(0 <= position && position < cos.size(1), "no rotation for position ", position, " of ", cos.size(1));
  }
  std::vector<Tensor> taps;
  for (size_t t = 0; t < tapped.size(); ++t) taps.push_back(features.narrow(1, t * x.size(1), x.size(1)));
  auto run = x.scalar_type() == at::kFloat ? run_layers<float> : run_layers<uint16_t>;
  run(*stack, x, input, where, at, cache, cos, sin, taps, tapped);
  return x;
}

// Rows of a table [V, h] and features [M, h], each normed with a gain of its own, side by side: [M, 2h].
inline Tensor normed_pairs(const Tensor& table, const Tensor& tokens, const Tensor& features, const Tensor& left,
                           const Tensor& right, double eps, int64_t kind) {
  Tensor x = features.contiguous(), ids = tokens.contiguous();
  int64_t rows = x.size(0), size = x.size(1);
  Tensor out = at::empty({rows, 2 * size}, x.options());
  Norm how{float(eps), kind};
  auto run = [&](auto zero) {
    using T = decltype(zero);
    for (int64_t m = 0; m < rows; ++m) {
      int64_t id = ids.const_data_ptr<int64_t>()[m];
      TORCH_CHECK(0 <= id && id < table.size(0), "no row ", id, " in a table of ", table.size(0));
      T* to = (T*)out.mutable_data_ptr() + m * 2 * size;
      rms_norm((const T*)table.const_data_ptr() + id * size, (const T*)left.const_data_ptr(), size, how, to);
      rms_norm((const T*)x.const_data_ptr() + m * size, (const T*)right.const_data_ptr(), size, how, to + size);
    }
  };
  if (x.scalar_type() == at::kFloat) run(float());
  else run(uint16_t());
  return out;
}

}  // namespace eagle
