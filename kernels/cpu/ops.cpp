// Decoding on CPUs; see kernels/cpu/__init__.py.
//
// Every row is given the same bits whatever rows are beside it: sums run in one order, fixed by the row alone. So a tree
// that is verified in one forward rounds as token by token decoding does, and the two agree exactly.

#include <torch/library.h>

#include "attend.h"
#include "coarse.h"
#include "compact.h"
#include "decode.h"
#include "draft.h"
#include "draw.h"
#include "filter.h"
#include "layers.h"
#include "linear.h"
#include "rank.h"

TORCH_LIBRARY(eagle_cpu, library) {
  library.class_<eagle::Layers>("Layers").def(
      torch::init<std::vector<eagle::Tensor>, std::vector<int64_t>, std::vector<int64_t>, double, double, double, int64_t>());
  library.class_<eagle::Decoder>("Decoder").def(
      torch::init<c10::intrusive_ptr<eagle::Layers>, eagle::Tensor, eagle::Tensor, std::optional<eagle::Tensor>,
                  std::optional<eagle::Tensor>, int64_t>());
  library.class_<eagle::Head>("Head").def(
      torch::init<c10::intrusive_ptr<eagle::Layers>, eagle::Tensor, eagle::Tensor, std::vector<eagle::Tensor>, eagle::Tensor,
                  std::optional<eagle::Tensor>, eagle::Tensor, eagle::Tensor, eagle::Tensor, eagle::Tensor, eagle::Tensor,
                  int64_t, double>());
  library.def("pack(Tensor weight) -> Tensor");
  library.def("pack_coarsely(Tensor weight) -> Tensor");
  library.def("coarse_pays() -> bool", eagle::coarse_pays);
  library.def("coarse_linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor");
  library.def("compact(Tensor(a!) cache, int[] slots, int[] lengths, int[] counts, int[] paths) -> ()");
  library.def("take_rows(Tensor x, int[] rows) -> Tensor");
  library.def("linear_argmax(Tensor x, Tensor packed, Tensor? bias, int outputs) -> int[]");
  library.def(
      "linear_draw(Tensor x, Tensor packed, Tensor? bias, int outputs, float[] temperature, int[] seed, int[] sample, "
      "int[] position) -> int[]");
  library.def("argmax(Tensor values) -> Tensor");
  library.def(
      "draw(Tensor logits, Tensor temperature, Tensor seed, Tensor sample, Tensor position, Tensor? floor=None) -> Tensor");
  library.def("filter_floor(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor log_min_p) -> Tensor");
  library.def(
      "rank(Tensor logits, Tensor ids, float[] temperature, float[] strength, int[] seed, int[] sample, int[] position, "
      "int pool, int width) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("likelihoods(Tensor log_probs, Tensor noise, int token, float[] strengths, float[] factors) -> Tensor");
  library.def("norm(Tensor x, Tensor weight, float eps, int kind) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor");
  library.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor places, Tensor cache, int layer, float scale, int window, "
      "float softcap) -> Tensor");
  library.def(
      "layers(__torch__.torch.classes.eagle_cpu.Layers stack, Tensor x, Tensor? input, Tensor places, Tensor positions, "
      "Tensor cache, Tensor cos, Tensor sin, Tensor(a!) features, int[] tapped) -> Tensor");
  library.def(
      "decode(__torch__.torch.classes.eagle_cpu.Decoder decoder, Tensor tokens, Tensor positions, Tensor places, Tensor cache, "
      "Tensor cos, Tensor sin, int[] tapped, bool find, float[] temperature, int[] seed, int[] sample) -> (Tensor, Tensor, int[])");
  library.def("head_fuse(__torch__.torch.classes.eagle_cpu.Head head, Tensor states) -> Tensor");
  library.def(
      "head_pass(__torch__.torch.classes.eagle_cpu.Head head, Tensor tokens, Tensor feature, Tensor positions, Tensor places, "
      "Tensor cache, Tensor cos, Tensor sin) -> Tensor");
  library.def("head_feedback(__torch__.torch.classes.eagle_cpu.Head head, Tensor hidden) -> Tensor");
  library.def("head_logits(__torch__.torch.classes.eagle_cpu.Head head, Tensor hidden) -> Tensor");
  library.def(
      "draft(__torch__.torch.classes.eagle_cpu.Head head, Tensor cache, Tensor cos, Tensor sin, Tensor states, int[] waiting, "
      "Tensor[] calibrations, int[] sequences, float[] settings, float[] strengths, float[] nodes, float[] rows, int[] paths, "
      "int lag, int pool) -> (int[], Tensor, Tensor, Tensor[], Tensor[])");
  library.def(
      "learn(Tensor(a!) calibration, Tensor(b!)? strengths, Tensor candidates, Tensor[] pools, int begin, int end, "
      "int root_row, int[] truth, float[] grid, float[] factors, float[] prior, float fading) -> ()");
}

TORCH_LIBRARY_IMPL(eagle_cpu, CPU, library) {
  library.impl("pack", eagle::pack);
  library.impl("pack_coarsely", eagle::pack_coarsely);
  library.impl("coarse_linear", eagle::coarse_linear);
  library.impl("compact", eagle::compact);
  library.impl("take_rows", eagle::take_rows);
  library.impl("linear_argmax", eagle::linear_argmax);
  library.impl("linear_draw", eagle::linear_draw);
  library.impl("argmax", eagle::argmax);
  library.impl("draw", eagle::draw);
  library.impl("filter_floor", eagle::filter_floor);
  library.impl("rank", eagle::rank);
  library.impl("likelihoods", eagle::likelihoods);
  library.impl("norm", eagle::norm);
  library.impl("linear", eagle::linear);
  library.impl("attend", eagle::attend);
  library.impl("layers", eagle::layers);
  library.impl("head_fuse", eagle::head_fuse);
  library.impl("head_pass", eagle::head_pass);
  library.impl("head_feedback", eagle::head_feedback);
  library.impl("head_logits", eagle::head_logits);
  library.impl("decode", eagle::decode);
  library.impl("draft", eagle::draft);
  library.impl("learn", eagle::learn);
}
