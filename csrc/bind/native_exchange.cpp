// `_native.Exchange`: the high-throughput dispatch and combine of one rank. No decisions here: arguments go into the
// requests of exchange/, the driver runs them with the GIL released, failures become classes of expertwire.errors.
// Pointers are ints; 0 is an absent tensor. The docstrings are the contract with expertwire.ep.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bind/native_bind.hpp"
#include "exchange/combine.hpp"
#include "exchange/dispatch.hpp"
#include "exchange/exchange.hpp"
#include "rows/rows.hpp"
#include "runtime/exchange_driver.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace expertwire {

namespace {

using bind::check_signals;
using bind::log_stall;
using bind::PyContext;
using exchange::CombineRequest;
using exchange::DispatchRequest;
using exchange::Handle;
using runtime::Failure;
using runtime::FailureKind;

template <class T>
T* pointer(std::uint64_t address) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

exchange::Shape make_shape(std::uint32_t rank, const std::vector<std::uint32_t>& node_of,
                           std::uint32_t local_experts_max, std::uint32_t ring_slots, std::uint64_t slot_bytes) {
    std::string wrong = exchange::node_table_error(node_of);
    if (!wrong.empty()) throw Failure(FailureKind::invalid_argument, wrong);
    exchange::Shape shape{rank, exchange::NodeTable(node_of), local_experts_max, ring_slots, slot_bytes};
    wrong = exchange::shape_error(shape);
    if (!wrong.empty()) throw Failure(FailureKind::invalid_argument, wrong);
    return shape;
}

struct PyHandle {
    std::shared_ptr<const Handle> handle;
};

struct PyDispatchResult {
    PyHandle handle;
    std::uint64_t received = 0;
    std::uint64_t used_bytes = 0;
    exchange::Extent extent;
    bool has_indices = false;
    bool has_weights = false;
    bool has_scales = false;
    bool spilled = false;
    std::uint64_t offer_offset = 0;
    std::vector<std::uint64_t> expert_counts;
    std::vector<exchange::Dispatch::Overflow> overflows;
};

class PyExchange {
  public:
    PyExchange(const PyContext& context, const exchange::Shape& shape)
        : context_(context.context), driver_(*context_, shape), exchange_(shape, driver_, driver_.data_bytes()) {
        driver_.on_stall(log_stall);
    }

    PyDispatchResult dispatch(const DispatchRequest& request, std::int64_t timeout_ms);
    void combine(const CombineRequest& request, std::int64_t timeout_ms);
    std::vector<exchange::PeerProgress> progress() const;
    void wake() { context_->ring(exchange_.rank()); }

  private:
    void run(exchange::Operation& operation, std::int64_t timeout_ms);
    void check_usable() const {
        context_->check_usable();
        if (!driver_.broken().empty()) throw Failure(FailureKind::state, driver_.broken());
    }

    std::shared_ptr<runtime::Context> context_;
    runtime::ExchangeDriver driver_;
    exchange::Exchange exchange_;
    std::mutex calls_;          // one operation at a time, whichever thread asks; taken without the GIL
    mutable std::mutex table_;  // guards last_
    std::vector<exchange::PeerProgress> last_;
};

void PyExchange::run(exchange::Operation& operation, std::int64_t timeout_ms) {
    const TimeNs timeout_ns = static_cast<TimeNs>(timeout_ms) * 1'000'000;
    try {
        driver_.run(operation, timeout_ns, [] { check_signals(); });
    } catch (...) {
        const std::lock_guard<std::mutex> lock(table_);
        last_ = operation.progress();
        throw;
    }
}

PyDispatchResult PyExchange::dispatch(const DispatchRequest& request, std::int64_t timeout_ms) {
    const std::lock_guard<std::mutex> lock(calls_);
    check_usable();
    std::string wrong;
    const std::unique_ptr<exchange::Dispatch> operation = exchange_.dispatch(request, wrong);
    if (!operation) throw Failure(FailureKind::invalid_argument, wrong);
    run(*operation, timeout_ms);
    PyDispatchResult result;
    result.handle.handle = operation->handle();
    result.received = operation->received();
    result.extent = operation->extent();
    result.used_bytes = result.extent.bytes;
    result.has_indices = request.topk_idx != nullptr;
    result.has_weights = request.topk_weights != nullptr;
    result.has_scales = request.scale_bytes > 0;
    result.spilled = operation->spilled();
    result.offer_offset = result.spilled ? 0 : request.offer_offset;
    result.expert_counts = operation->expert_counts();
    result.overflows = operation->overflows();
    return result;
}

void PyExchange::combine(const CombineRequest& request, std::int64_t timeout_ms) {
    const std::lock_guard<std::mutex> lock(calls_);
    check_usable();
    std::string wrong;
    const std::unique_ptr<exchange::Combine> operation = exchange_.combine(request, wrong);
    if (!operation) throw Failure(FailureKind::invalid_argument, wrong);
    run(*operation, timeout_ms);
}

std::vector<exchange::PeerProgress> PyExchange::progress() const {
    const std::lock_guard<std::mutex> lock(table_);
    return last_;
}

nb::list progress_rows(const PyExchange& self) {
    nb::list rows;
    for (const exchange::PeerProgress& peer : self.progress()) {
        nb::dict row;
        row["rank"] = peer.rank;
        row["notified"] = peer.notified;
        row["rows_expected"] = peer.rows_expected;
        row["rows_arrived"] = peer.rows_arrived;
        row["chunks_to_send"] = peer.chunks_to_send;
        row["chunks_sent"] = peer.chunks_sent;
        row["chunks_credited"] = peer.chunks_credited;
        row["missing"] = peer.missing;
        rows.append(row);
    }
    return rows;
}

nb::dict result_layout(const PyDispatchResult& self) {
    nb::dict layout;
    layout["x"] = self.offer_offset + self.extent.rows;
    layout["src_idx"] = self.offer_offset + self.extent.src_idx;
    layout["topk_idx"] = self.has_indices ? nb::cast(self.offer_offset + self.extent.indices) : nb::none();
    layout["topk_weights"] = self.has_weights ? nb::cast(self.offer_offset + self.extent.weights) : nb::none();
    layout["scales"] = self.has_scales ? nb::cast(self.offer_offset + self.extent.scales) : nb::none();
    return layout;
}

nb::dict layout_bytes(std::uint32_t rank, const std::vector<std::uint32_t>& node_of, std::uint32_t local_experts_max,
                      std::uint32_t ring_slots, std::uint64_t slot_bytes) {
    const exchange::Layout layout(make_shape(rank, node_of, local_experts_max, ring_slots, slot_bytes));
    nb::dict bytes;
    bytes["control_bytes"] = layout.control_bytes();
    bytes["staging_bytes"] = layout.staging_bytes(rank);
    return bytes;
}

void layout_counts(std::uint64_t topk_idx, std::uint32_t index_bytes, std::uint64_t tokens, std::uint32_t topk,
                   std::uint64_t num_experts, const std::vector<std::uint64_t>& expert_first,
                   const std::vector<std::uint32_t>& node_of, std::uint64_t per_rank, std::uint64_t per_node,
                   std::uint64_t per_expert, std::uint64_t in_rank) {
    const std::string table = exchange::node_table_error(node_of);
    if (!table.empty()) throw Failure(FailureKind::invalid_argument, table);
    if (index_bytes != 4 && index_bytes != 8) {
        throw Failure(FailureKind::invalid_argument,
                      "index_bytes is " + std::to_string(index_bytes) + ", must be 4 or 8");
    }
    const std::string owners = exchange::expert_first_error(expert_first, node_of.size(), num_experts);
    if (!owners.empty()) throw Failure(FailureKind::invalid_argument, owners);
    const exchange::NodeTable nodes(node_of);
    const nb::gil_scoped_release released;
    const rows::LayoutCounts out{pointer<std::int32_t>(per_rank), pointer<std::int32_t>(per_node),
                                 pointer<std::int32_t>(per_expert), pointer<std::uint8_t>(in_rank)};
    const rows::LayoutError error =
        rows::count_layout(pointer<const std::byte>(topk_idx), index_bytes, tokens, topk, expert_first.data(),
                           nodes.ranks(), node_of.data(), nodes.nodes(), out);
    if (error.failed) {
        throw Failure(FailureKind::invalid_argument,
                      "topk_idx[" + std::to_string(error.token) + ", " + std::to_string(error.slot) + "] is " +
                          std::to_string(error.value) + ", must be -1 (no expert) or in [0, " +
                          std::to_string(expert_first.back()) + ")");
    }
}

std::uint64_t extent_bytes(const std::string& kind, std::uint64_t rows, std::uint64_t row_bytes, std::uint32_t topk,
                           std::uint32_t index_bytes, bool has_weights, std::uint32_t scale_bytes) {
    const exchange::RowShape row{row_bytes, scale_bytes, topk, index_bytes, has_weights};
    if (kind == "dispatch") return exchange::dispatch_extent(rows, row).bytes;
    if (kind == "combine") return exchange::combine_extent(rows, row).bytes;
    throw Failure(FailureKind::invalid_argument, "kind is '" + kind + "', must be 'dispatch' or 'combine'");
}

void bind_records(nb::module_& module) {
    nb::class_<PyHandle>(module, "ExchangeHandle", "What a dispatch leaves for its combine. Immutable.")
        .def_prop_ro("epoch", [](const PyHandle& self) { return self.handle->epoch; })
        .def_prop_ro("rank", [](const PyHandle& self) { return self.handle->rank; })
        .def_prop_ro(
            "tokens", [](const PyHandle& self) { return self.handle->tokens; }, "Rows of x of this rank.")
        .def_prop_ro(
            "received", [](const PyHandle& self) { return self.handle->received(self.handle->rank); },
            "Rows that this rank received, over all sources.")
        .def_prop_ro(
            "matrix", [](const PyHandle& self) { return self.handle->matrix; },
            "list[int], R * R: rows from source s to destination d at [s * R + d].")
        .def_prop_ro(
            "node_matrix", [](const PyHandle& self) { return self.handle->node_matrix; },
            "list[int], R * RR: distinct rows from source s to node b at [s * RR + b].");
    nb::class_<PyDispatchResult>(module, "DispatchResult", "What a dispatch received. Immutable.")
        .def_ro("handle", &PyDispatchResult::handle)
        .def_ro("received", &PyDispatchResult::received, "Rows N.")
        .def_prop_ro("layout", &result_layout,
                     "dict: byte offsets from the start of my data region, or of what was allocated: x [N, row_bytes], "
                     "src_idx i32[N], topk_idx "
                     "[N, K] of the index type sent (local ids, -1 elsewhere; None without), topk_weights f32[N, K] (0 "
                     "where the id is -1; None without), scales [N, scale_bytes] (None without).")
        .def_ro("used_bytes", &PyDispatchResult::used_bytes,
                "Bytes of the offered extent, or of what was allocated, that hold the result.")
        .def_ro("spilled", &PyDispatchResult::spilled, "The result lies in what was allocated.")
        .def_ro("expert_counts", &PyDispatchResult::expert_counts,
                "list[int]: rows per local expert (duplicates counted twice), not rounded; empty with a handle.")
        .def_prop_ro(
            "overflows",
            [](const PyDispatchResult& self) {
                std::vector<std::pair<std::uint32_t, std::uint64_t>> pairs;
                for (const auto& overflow : self.overflows) pairs.emplace_back(overflow.rank, overflow.total);
                return pairs;
            },
            "list[tuple[int, int]]: ranks that were sent more than rows_max rows, and how many; the same on every "
            "rank.");
}

constexpr const char* kClassDoc =
    R"(One rank's high-throughput exchange. The context has regions 'control' and 'staging' (sizes from layout(), zeroed) and
'data' (any size), mapped for all peers of the node and announced by the others. All ranks call dispatch and combine in the
same order. Calls from several threads are serialised.)";

constexpr const char* kInitDoc =
    R"(node_of[r]: node of rank r, numbered 0..RR-1 without a gap. local_experts_max: the most experts that any rank will own in
any call; all ranks must give the same, as also ring_slots (>= 1) and slot_bytes (a multiple of 64, at least one row with its
top-k: a row that does not fit raises InvalidArgumentError at the call). Raises CapacityError where a region is too small,
with both numbers.)";

constexpr const char* kLayoutDoc =
    R"({'control_bytes', 'staging_bytes'} of the rank's regions, before anything is created. staging_bytes is 0 with one node
(create a region of 64 bytes then).)";

constexpr const char* kDispatchDoc =
    R"(Sends row t of x to every rank r with in_rank[t, r] and returns what this rank received: rows ordered by source rank,
then source token, at offer_offset (a multiple of 64) in my data region. Where they do not fit there, they pass through it in
rounds and are gathered in memory that allocate(bytes) gives, an address that is a multiple of 64.

x: [tokens, row_bytes] contiguous, anywhere, of element type x_type. scales (scale_bytes 0: none): [tokens, scale_bytes] of
element type scales_type ('' without). in_rank: bool[tokens, R]. topk_idx (0: none): [tokens, topk] global ids of
topk_index_bytes (4 or 8). topk_weights (0: none): f32[tokens, topk], needs topk_idx. counts_per_rank i32[R], counts_per_node
i32[RR] and counts_per_expert i32[num_experts] (each 0: counted here, per expert only from topk_idx): checked against in_rank
and topk_idx. expert_first: R + 1 entries. Nothing is read where tokens is 0, but all ranks must agree on whether there are
weights: a tensor of no rows is any address but 0.
rows_max (0: none): results have exactly so many rows, valid ones first, ids of the rest -1; needs topk_idx. A rank that would
receive more keeps the first of them.
handle: repeats that dispatch's routing and rows_max: in_rank, topk_idx, topk_weights and counts must be 0, topk and num_experts 0,
expert_first empty; tokens must be the handle's.

Raises InvalidArgumentError (nothing started), MismatchError (ranks disagree: on every rank, the exchange stays usable),
CapacityError (an offered extent is too small for one row, or for rows_max rows: on every rank, stays usable; the message has rank, rows, bytes and capacity),
PeerError, DeadlineError, TransferError; after one of these three, or an interrupt, every call raises StateError.)";

constexpr const char* kCombineDoc =
    R"(Sends the bf16 rows x[rows, row_bytes / 2], in the order in which the handle's dispatch received them, back to their homes
and writes their sums to out, bf16[tokens, row_bytes / 2] (tokens: the handle's). weights (topk 0: none): f32[rows, topk],
summed into out_weights f32[tokens, topk]. bias0, bias1 (0: none): bf16[tokens, row_bytes / 2].

x inside my data region is read in place (weights may then lie there or not); elsewhere x and weights are copied to the
offered extent first, in rounds where it has fewer than extent_bytes('combine', …) bytes. Raises as dispatch.)";

constexpr const char* kCountsDoc =
    R"(get_dispatch_layout's counting. topk_idx: address of contiguous [tokens, topk] ids of index_bytes (4 or 8) each. Writes
i32[R] at per_rank, i32[RR] at per_node (0: leave out), i32[E] at per_expert and bool[tokens, R] at in_rank, every element.
expert_first has R + 1 entries: rank r owns experts [first[r], first[r+1]). -1 is no expert. Raises InvalidArgumentError
naming token, slot and value for any other id outside [0, E); outputs are then unspecified.)";

constexpr const char* kExtentDoc =
    R"(Bytes of the extent that a 'dispatch' receiving `rows` rows needs (topk 0: without ids), or that a 'combine' of `rows`
rows needs where x and the weights are not in the data region.)";

constexpr const char* kProgressDoc =
    R"(list[dict], one row per peer as of the last failed call: rank, notified, rows_expected, rows_arrived, chunks_to_send,
chunks_sent, chunks_credited, missing (str).)";

exchange::Element element_named(const std::string& name) {
    using exchange::Element;
    if (name.empty()) return Element::none;
    if (name == "bfloat16") return Element::bfloat16;
    if (name == "float8_e4m3fn") return Element::float8_e4m3fn;
    if (name == "float8_e4m3fnuz") return Element::float8_e4m3fnuz;
    if (name == "float32") return Element::float32;
    if (name == "int32") return Element::int32;
    throw Failure(FailureKind::invalid_argument, "there is no element type '" + name + "' here");
}

PyDispatchResult dispatch(PyExchange& self, std::uint64_t x, std::uint64_t tokens, std::uint64_t row_bytes,
                          const std::string& x_type, std::uint64_t scales, std::uint32_t scale_bytes,
                          const std::string& scales_type, std::uint64_t in_rank, std::uint64_t topk_idx,
                          std::uint32_t topk_index_bytes, std::uint32_t topk, std::uint64_t topk_weights,
                          std::uint64_t counts_per_rank, std::uint64_t counts_per_node, std::uint64_t counts_per_expert,
                          std::uint64_t num_experts, const std::vector<std::uint64_t>& expert_first,
                          std::uint64_t rows_max, const PyHandle* handle, std::uint64_t offer_offset,
                          std::uint64_t offer_capacity, const nb::callable& allocate, std::int64_t timeout_ms) {
    DispatchRequest request;
    request.allocate = [&allocate](std::uint64_t bytes) {  // by reference: copies are made without the GIL
        const nb::gil_scoped_acquire acquired;
        return pointer<std::byte>(nb::cast<std::uint64_t>(allocate(bytes)));
    };
    request.x = pointer<const std::byte>(x);
    request.tokens = tokens;
    request.row_bytes = row_bytes;
    request.element = element_named(x_type);
    request.scales = pointer<const std::byte>(scales);
    request.scale_bytes = scale_bytes;
    request.scale_element = element_named(scales_type);
    request.in_rank = pointer<const std::uint8_t>(in_rank);
    request.topk_idx = pointer<const std::byte>(topk_idx);
    request.index_bytes = topk_index_bytes;
    request.topk = topk;
    request.topk_weights = pointer<const float>(topk_weights);
    request.per_rank = pointer<const std::int32_t>(counts_per_rank);
    request.per_node = pointer<const std::int32_t>(counts_per_node);
    request.per_expert = pointer<const std::int32_t>(counts_per_expert);
    request.num_experts = num_experts;
    request.expert_first = expert_first;
    request.rows_max = rows_max;
    if (handle != nullptr) request.handle = handle->handle;
    request.offer_offset = offer_offset;
    request.offer_capacity = offer_capacity;
    const nb::gil_scoped_release released;
    return self.dispatch(request, timeout_ms);
}

void combine(PyExchange& self, std::uint64_t x, std::uint64_t rows, std::uint64_t row_bytes, std::uint64_t weights,
             std::uint32_t topk, std::uint64_t bias0, std::uint64_t bias1, std::uint64_t out, std::uint64_t out_weights,
             const PyHandle& handle, std::uint64_t offer_offset, std::uint64_t offer_capacity,
             std::int64_t timeout_ms) {
    CombineRequest request;
    request.x = pointer<const std::byte>(x);
    request.rows = rows;
    request.row_bytes = row_bytes;
    request.weights = pointer<const float>(weights);
    request.topk = topk;
    request.bias0 = pointer<const std::byte>(bias0);
    request.bias1 = pointer<const std::byte>(bias1);
    request.out = pointer<std::byte>(out);
    request.out_weights = pointer<float>(out_weights);
    request.handle = handle.handle;
    request.offer_offset = offer_offset;
    request.offer_capacity = offer_capacity;
    const nb::gil_scoped_release released;
    self.combine(request, timeout_ms);
}

void bind_sizes(nb::class_<PyExchange>& exchange) {
    exchange
        .def_static("layout", &layout_bytes, "rank"_a, "node_of"_a, "local_experts_max"_a, "ring_slots"_a,
                    "slot_bytes"_a, kLayoutDoc)
        .def_static("layout_counts", &layout_counts, "topk_idx"_a, "index_bytes"_a, "tokens"_a, "topk"_a,
                    "num_experts"_a, "expert_first"_a, "node_of"_a, "per_rank"_a, "per_node"_a, "per_expert"_a,
                    "in_rank"_a, kCountsDoc)
        .def_static("extent_bytes", &extent_bytes, "kind"_a, "rows"_a, "row_bytes"_a, "topk"_a, "index_bytes"_a,
                    "has_weights"_a, "scale_bytes"_a = 0, kExtentDoc);
}

}  // namespace

void bind_exchange(nb::module_& module) {
    bind_records(module);
    nb::class_<PyExchange> exchange(module, "Exchange", kClassDoc);
    exchange
        .def(
            "__init__",
            [](PyExchange* self, const PyContext& context, const std::vector<std::uint32_t>& node_of,
               std::uint32_t local_experts_max, std::uint32_t ring_slots, std::uint64_t slot_bytes) {
                const exchange::Shape shape =
                    make_shape(context.context->rank(), node_of, local_experts_max, ring_slots, slot_bytes);
                new (self) PyExchange(context, shape);
            },
            "context"_a, "node_of"_a, "local_experts_max"_a, "ring_slots"_a, "slot_bytes"_a, kInitDoc)
        .def("dispatch", &dispatch, "x"_a, "tokens"_a, "row_bytes"_a, "x_type"_a, "scales"_a, "scale_bytes"_a,
             "scales_type"_a, "in_rank"_a, "topk_idx"_a, "topk_index_bytes"_a, "topk"_a, "topk_weights"_a,
             "counts_per_rank"_a, "counts_per_node"_a, "counts_per_expert"_a, "num_experts"_a, "expert_first"_a,
             "rows_max"_a, "handle"_a.none(), "offer_offset"_a, "offer_capacity"_a, "allocate"_a, "timeout_ms"_a,
             kDispatchDoc)
        .def("combine", &combine, "x"_a, "rows"_a, "row_bytes"_a, "weights"_a, "topk"_a, "bias0"_a, "bias1"_a, "out"_a,
             "out_weights"_a, "handle"_a, "offer_offset"_a, "offer_capacity"_a, "timeout_ms"_a, kCombineDoc)
        .def("progress", &progress_rows, kProgressDoc)
        .def("wake", &PyExchange::wake,
             "Rings this rank's own doorbell: a waiting call looks around once. Any thread.");
    bind_sizes(exchange);
}

}  // namespace expertwire
