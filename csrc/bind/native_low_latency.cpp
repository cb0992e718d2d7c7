// `_native.LowLatency`: the low-latency dispatch and combine of one rank. No decisions here: arguments go into the
// requests of exchange/, the driver runs them with the GIL released, failures become classes of expertwire.errors.
// Pointers are ints; 0 is an absent tensor. The docstrings are the contract with expertwire.ep.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bind/native_bind.hpp"
#include "exchange/low_latency.hpp"
#include "runtime/low_latency_driver.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace expertwire {

namespace {

using bind::check_signals;
using bind::log_stall;
using bind::PyContext;
using exchange::LowLatencyCall;
using exchange::LowLatencyHandle;
using runtime::Failure;
using runtime::FailureKind;

template <class T>
T* pointer(std::uint64_t address) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

exchange::NodeTable node_table(const std::vector<std::uint32_t>& node_of) {
    const std::string wrong = exchange::node_table_error(node_of);
    if (!wrong.empty()) throw Failure(FailureKind::invalid_argument, wrong);
    return exchange::NodeTable(node_of);
}

LowLatencyCall make_call(std::uint64_t tokens_max, std::uint64_t hidden, std::uint64_t num_experts, std::uint32_t topk,
                         std::uint32_t format, std::vector<std::uint64_t> expert_first) {
    if (format > static_cast<std::uint32_t>(exchange::RowFormat::fp8_ue8m0)) {
        throw Failure(FailureKind::invalid_argument, "format is " + std::to_string(format) + ", must be 0 to 3");
    }
    return {tokens_max, hidden, num_experts, topk, static_cast<exchange::RowFormat>(format), std::move(expert_first)};
}

// A call between its two parts, and the handle of a dispatch.
struct PyLowLatencyCall {
    std::shared_ptr<exchange::LowLatencyOperation> operation;
    std::shared_ptr<const LowLatencyHandle> handle;
};

class PyLowLatency {
  public:
    PyLowLatency(const PyContext& context, exchange::LowLatencyShape shape, bool shrink)
        : context_(context.context), driver_(*context_, shape, shrink) {
        driver_.on_stall(log_stall);
    }

    PyLowLatencyCall dispatch(const exchange::LowLatencyDispatchRequest& request, std::int64_t timeout_ms) {
        const std::lock_guard<std::mutex> lock(calls_);
        check_usable();
        driver_.begin("low_latency_dispatch", ns(timeout_ms), [] { check_signals(); });
        exchange::Refusal refusal;
        PyLowLatencyCall call;
        call.operation = driver_.exchange().dispatch(request, call.handle, refusal);
        if (!call.operation) runtime::throw_refusal(refusal);
        driver_.send(*call.operation, ns(timeout_ms), [] { check_signals(); });
        return call;
    }
    PyLowLatencyCall combine(const exchange::LowLatencyCombineRequest& request, std::int64_t timeout_ms) {
        const std::lock_guard<std::mutex> lock(calls_);
        check_usable();
        driver_.begin("low_latency_combine", ns(timeout_ms), [] { check_signals(); });
        exchange::Refusal refusal;
        PyLowLatencyCall call;
        call.operation = driver_.exchange().combine(request, refusal);
        if (!call.operation) runtime::throw_refusal(refusal);
        driver_.send(*call.operation, ns(timeout_ms), [] { check_signals(); });
        return call;
    }
    void receive(const PyLowLatencyCall& call, std::int64_t timeout_ms) {
        const std::lock_guard<std::mutex> lock(calls_);
        const bool good = call.operation->failure().reason == exchange::FailureReason::none;
        if (call.operation->ended() && good) return;
        check_usable();
        driver_.receive(*call.operation, ns(timeout_ms), [] { check_signals(); });
    }
    std::uint64_t combine_buffer(const PyLowLatencyCall& dispatch, std::int64_t timeout_ms) {
        const std::lock_guard<std::mutex> lock(calls_);
        check_usable();
        return driver_.combine_buffer(*dispatch.handle, ns(timeout_ms), [] { check_signals(); });
    }
    void mask(std::uint32_t rank, bool masked) {
        const std::lock_guard<std::mutex> lock(calls_);
        check_usable();
        driver_.mask(rank, masked);
    }
    std::vector<bool> masked() {
        const std::lock_guard<std::mutex> lock(calls_);
        std::vector<bool> ranks;
        for (std::uint32_t rank = 0; rank < driver_.exchange().nodes().ranks(); ++rank) {
            ranks.push_back(driver_.exchange().masked(rank));
        }
        return ranks;
    }

  private:
    static TimeNs ns(std::int64_t timeout_ms) { return static_cast<TimeNs>(timeout_ms) * 1'000'000; }
    void check_usable() const {
        context_->check_usable();
        if (!driver_.broken().empty()) throw Failure(FailureKind::state, driver_.broken());
    }

    std::shared_ptr<runtime::Context> context_;
    runtime::LowLatencyDriver driver_;
    std::mutex calls_;  // one part at a time, whichever thread asks; taken without the GIL
};

constexpr const char* kClassDoc =
    R"(One rank's low-latency exchange. The context has regions 'll_control' (control_bytes(), zeroed) and 'll_data' (the same size
on every rank), mapped for all peers of the node and announced by the others. All ranks make the same calls in the same
order; each has two parts, and the second one (receive) of at most two calls may be outstanding. Calls from several threads
are serialised. shrink: a rank that is dead or does not answer until the deadline is masked, and the call goes on.)";

constexpr const char* kDispatchDoc =
    R"(Sends each row of x to the experts of its ids; returns when all rows are handed over. receive() fills the outputs.

x: bf16 [tokens, hidden] contiguous. topk_idx: [tokens, topk] ids of index_bytes (4 or 8), -1 none. format: 0 bf16, 1 fp8 with
scales f32, 2 with power-of-two scales, 3 with UE8M0 words. expert_first: R + 1 entries. Outputs, which must live until
receive() has returned: out [E_l, R * M, hidden] of bf16 or fp8, scales 32-bit [E_l, S, R * M] (0 for bf16), counts i32[E_l],
src_info i32[E_l, R * M], layout_range i64[E_l, R], statistics i32[E_l] and wait_ns i64[R] (each may be 0), both added to.

Raises InvalidArgumentError, StateError (nothing was sent), DeadlineError, PeerError, TransferError. What does not fit is a
CapacityError at receive(), where ranks that disagree get their MismatchError: everybody hears of it.)";

constexpr const char* kCombineDoc =
    R"(Sends rows back to where they came from; receive() writes the weighted sums to out, bf16 [tokens, hidden].

x: bf16 [E_l, R * M, hidden] contiguous, unused with zero_copy: then the rows are in the combine buffer. topk_idx as in the
dispatch; ids may have become -1, or stand in another order. weights f32[tokens, topk]; both are read at the call.)";

void bind_calls(nb::class_<PyLowLatency>& low_latency) {
    low_latency
        .def(
            "dispatch",
            [](PyLowLatency& self, std::uint64_t x, std::uint64_t tokens, std::uint64_t hidden, std::uint64_t topk_idx,
               std::uint32_t index_bytes, std::uint32_t topk, std::uint64_t tokens_max, std::uint64_t num_experts,
               const std::vector<std::uint64_t>& expert_first, std::uint32_t format, std::uint64_t out,
               std::uint64_t scales, std::uint64_t counts, std::uint64_t src_info, std::uint64_t layout_range,
               std::uint64_t statistics, std::uint64_t wait_ns, std::int64_t timeout_ms) {
                exchange::LowLatencyDispatchRequest request;
                request.x = pointer<const std::byte>(x);
                request.tokens = tokens;
                request.topk_idx = pointer<const std::byte>(topk_idx);
                request.index_bytes = index_bytes;
                request.call = make_call(tokens_max, hidden, num_experts, topk, format, expert_first);
                request.out = pointer<std::byte>(out);
                request.scales = pointer<std::uint32_t>(scales);
                request.counts = pointer<std::int32_t>(counts);
                request.src_info = pointer<std::int32_t>(src_info);
                request.layout_range = pointer<std::int64_t>(layout_range);
                request.statistics = pointer<std::int32_t>(statistics);
                request.wait_ns = pointer<std::int64_t>(wait_ns);
                const nb::gil_scoped_release released;
                return self.dispatch(request, timeout_ms);
            },
            "x"_a, "tokens"_a, "hidden"_a, "topk_idx"_a, "index_bytes"_a, "topk"_a, "tokens_max"_a, "num_experts"_a,
            "expert_first"_a, "format"_a, "out"_a, "scales"_a, "counts"_a, "src_info"_a, "layout_range"_a,
            "statistics"_a, "wait_ns"_a, "timeout_ms"_a, kDispatchDoc)
        .def(
            "combine",
            [](PyLowLatency& self, std::uint64_t x, bool zero_copy, std::uint64_t topk_idx, std::uint32_t index_bytes,
               std::uint64_t weights, std::uint64_t tokens, std::uint32_t topk, std::uint64_t hidden,
               const PyLowLatencyCall& dispatch, std::uint64_t out, std::uint64_t wait_ns, std::int64_t timeout_ms) {
                exchange::LowLatencyCombineRequest request;
                request.x = pointer<const std::byte>(x);
                request.zero_copy = zero_copy;
                request.topk_idx = pointer<const std::byte>(topk_idx);
                request.index_bytes = index_bytes;
                request.weights = pointer<const float>(weights);
                request.tokens = tokens;
                request.topk = topk;
                request.hidden = hidden;
                request.handle = dispatch.handle;
                request.out = pointer<std::byte>(out);
                request.wait_ns = pointer<std::int64_t>(wait_ns);
                const nb::gil_scoped_release released;
                return self.combine(request, timeout_ms);
            },
            "x"_a, "zero_copy"_a, "topk_idx"_a, "index_bytes"_a, "weights"_a, "tokens"_a, "topk"_a, "hidden"_a,
            "dispatch"_a, "out"_a, "wait_ns"_a, "timeout_ms"_a, kCombineDoc)
        .def("receive", &PyLowLatency::receive, "call"_a, "timeout_ms"_a, nb::call_guard<nb::gil_scoped_release>(),
             "The second part of a call, once; again it does nothing.")
        .def("combine_buffer", &PyLowLatency::combine_buffer, "dispatch"_a, "timeout_ms"_a,
             nb::call_guard<nb::gil_scoped_release>(),
             "Byte offset in region 'll_data' where the rows of the next call, a zero-copy combine, are to be written.")
        .def("mask", &PyLowLatency::mask, "rank"_a, "masked"_a, nb::call_guard<nb::gil_scoped_release>(),
             "From now on this rank leaves that one out, or no longer does. Local.")
        .def("masked", &PyLowLatency::masked, nb::call_guard<nb::gil_scoped_release>(),
             "list[bool], by rank: whom this rank leaves out.");
}

}  // namespace

void bind_low_latency(nb::module_& module) {
    nb::class_<PyLowLatencyCall>(module, "LowLatencyCall",
                                 "A low-latency call that was sent; of a dispatch also its handle.")
        .def_prop_ro("epoch", [](const PyLowLatencyCall& self) { return self.operation->epoch(); })
        .def_prop_ro("ended", [](const PyLowLatencyCall& self) { return self.operation->ended(); });
    nb::class_<PyLowLatency> low_latency(module, "LowLatency", kClassDoc);
    low_latency.def(
        "__init__",
        [](PyLowLatency* self, const PyContext& context, const std::vector<std::uint32_t>& node_of,
           std::uint32_t local_experts_max, bool shrink) {
            new (self) PyLowLatency(context, {context.context->rank(), node_table(node_of), local_experts_max}, shrink);
        },
        "context"_a, "node_of"_a, "local_experts_max"_a, "shrink"_a);
    bind_calls(low_latency);
    low_latency
        .def_static(
            "control_bytes",
            [](std::uint32_t ranks, std::uint32_t local_experts_max) {
                return exchange::LowLatencyLayout(ranks, local_experts_max).control_bytes();
            },
            "ranks"_a, "local_experts_max"_a, "Bytes of region 'll_control'.")
        .def_static(
            "needed_bytes",
            [](const std::vector<std::uint32_t>& node_of, std::uint64_t tokens_max, std::uint64_t hidden,
               std::uint64_t num_experts, std::uint32_t topk, std::uint32_t format,
               const std::vector<std::uint64_t>& expert_first) {
                return exchange::low_latency_bytes(
                    make_call(tokens_max, hidden, num_experts, topk, format, expert_first), node_table(node_of));
            },
            "node_of"_a, "tokens_max"_a, "hidden"_a, "num_experts"_a, "topk"_a, "format"_a, "expert_first"_a,
            "Bytes of region 'll_data' with which a dispatch of that shape and its combine have room.");
}

}  // namespace expertwire
