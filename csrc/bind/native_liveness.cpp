// LivenessProbe: what one rank concludes from given words at given times, without threads, fabric or clock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bind/native_bind.hpp"
#include "runtime/liveness.hpp"

namespace nb = nanobind;

namespace expertwire {
namespace {

using namespace nb::literals;
using runtime::Liveness;
using runtime::LivenessOptions;
using runtime::PeerState;
using runtime::Verdict;

constexpr TimeNs ms = 1'000'000;
constexpr std::uint32_t ranks_max = 64;

class LivenessProbe {
  public:
    LivenessProbe(std::uint32_t rank, std::uint32_t size) {
        if (size > ranks_max || rank >= size)
            throw nb::value_error("LivenessProbe: size must be at most 64 and rank below size");
        memory_ = std::make_unique<Memory>();
        words_ = {memory_->bytes, {size}};
        LivenessOptions options;
        options.rank = rank;
        options.size = size;
        options.instance = 0x1000u * (rank + 1) + 1;
        options.use_pidfd = false;
        liveness_ = std::make_unique<Liveness>(options, words_);
        instances_.assign(size, 1);
    }

    void beat(std::uint32_t rank) { words_.pulse(checked(rank)).heartbeat.fetch_add(1); }
    void say(std::uint32_t rank, std::optional<std::uint32_t> verdict, bool leaving, bool old_speaker,
             bool old_accused) {
        runtime::PulseBlock& pulse = words_.pulse(checked(rank));
        const std::uint64_t speaker = instance(rank, old_speaker);
        if (verdict)
            pulse.verdict.store(
                Verdict{checked(*verdict), Verdict::tag(instance(*verdict, old_accused)), Verdict::tag(speaker)}
                    .word());
        if (leaving) pulse.leaving.store(speaker);
    }
    void take_back(std::uint32_t rank) { words_.pulse(checked(rank)).verdict.store(0); }
    std::optional<std::uint32_t> own_verdict() const {
        const std::uint64_t word = liveness_->own(0).verdict;
        return word == 0 ? std::nullopt : std::optional(Verdict::of(word).accused);
    }
    bool farewell(std::uint32_t rank) const { return liveness_->pulse(checked(rank), 0).leaving; }
    void fences(std::uint32_t rank, std::uint32_t whom) {
        words_.pulse(checked(rank)).fenced.fetch_or(std::uint64_t{1} << (whom % 64));
    }
    void remove(std::uint32_t rank) {
        liveness_->publish_fenced(checked(rank), true);
        liveness_->remove(rank);
        ++instances_[rank];
    }
    void add(std::uint32_t rank, std::int64_t now_ms) {
        liveness_->add(checked(rank), {}, instance(rank, false), now_ms * ms);
    }
    void lose_connection(std::uint32_t rank, std::int64_t now_ms) {
        liveness_->suspect(checked(rank), "its connection broke", now_ms * ms);
    }
    void tick(std::int64_t now_ms) { liveness_->tick(now_ms * ms); }
    std::vector<std::uint32_t> take_deaths() { return liveness_->take_deaths(); }
    std::optional<std::tuple<std::uint32_t, std::int32_t, std::string>> fault() const {
        const auto fault = liveness_->fault();
        if (!fault) return std::nullopt;
        return std::make_tuple(fault->rank, fault->told_by, fault->why);
    }
    const char* state(std::uint32_t rank) const {
        static constexpr std::array<const char*, 6> names{"absent", "watched", "suspected", "dead", "left", "removed"};
        return names[static_cast<std::size_t>(liveness_->state(checked(rank)))];
    }
    bool undecided(std::uint32_t rank, std::int64_t since_ms) const {
        return liveness_->undecided(checked(rank), since_ms * ms);
    }

  private:
    struct alignas(64) Memory {
        std::byte bytes[runtime::SharedLayout{ranks_max}.bytes()]{};
    };

    std::uint32_t checked(std::uint32_t rank) const {
        if (rank >= words_.layout.ranks) throw nb::index_error("LivenessProbe: rank is not below size");
        return rank;
    }

    // Of whoever has that name now, or is the next to; or of the one before it.
    std::uint64_t instance(std::uint32_t rank, bool old) const {
        return 0x1000u * (rank + 1) + instances_[rank] - (old ? 1 : 0);
    }

    std::unique_ptr<Memory> memory_;
    std::vector<std::uint64_t> instances_;  // by rank: how many have had the name
    runtime::SharedBlock words_;
    std::unique_ptr<Liveness> liveness_;
};

// Where region "runtime" of a job of `ranks` has what `source` says here: bytes from its start by word, and its size.
nb::dict runtime_words(std::uint32_t ranks, std::uint32_t source) {
    if (source >= ranks) throw nb::index_error("runtime_words: source is not below ranks");
    const runtime::SharedLayout layout{ranks};
    const std::uint64_t pulse = layout.pulse_offset(source);
    nb::dict found;
    found["bytes"] = layout.bytes();
    found["barrier"] = layout.barrier_offset(source);
    found["low_latency_call"] = pulse + offsetof(runtime::PulseBlock, low_latency_call);
    found["low_latency_told"] = pulse + offsetof(runtime::PulseBlock, low_latency_told);
    return found;
}

}  // namespace

void bind_liveness(nb::module_& module) {
    module.def("runtime_words", &runtime_words, "ranks"_a, "source"_a,
               "Where region 'runtime' has what `source` says: {word: byte offset}, and 'bytes' of it all; for tests.");
    nb::class_<LivenessProbe>(
        module, "LivenessProbe",
        "What a rank concludes from others' words at given times, by the heartbeat rules (no pidfd); for tests.")
        .def(nb::init<std::uint32_t, std::uint32_t>(), "rank"_a, "size"_a)
        .def("beat", &LivenessProbe::beat, "rank"_a, "A heartbeat of that rank arrives.")
        .def("say", &LivenessProbe::say, "rank"_a, "verdict"_a = nb::none(), "leaving"_a = false, nb::kw_only(),
             "old_speaker"_a = false, "old_accused"_a = false,
             "Words of that rank arrive; said by, or about, the process that had its name before, where old.")
        .def("fences", &LivenessProbe::fences, "rank"_a, "whom"_a, "The word of that rank that it has removed another.")
        .def("take_back", &LivenessProbe::take_back, "rank"_a, "The verdict of that rank is no more.")
        .def("own_verdict", &LivenessProbe::own_verdict, "Whom this rank holds dead before the others.")
        .def("farewell", &LivenessProbe::farewell, "rank"_a, "Whether who has that name now says that it leaves.")
        .def("add", &LivenessProbe::add, "rank"_a, "now_ms"_a,
             "A process under that name; after its removal, another one.")
        .def("remove", &LivenessProbe::remove, "rank"_a, "Remove that rank here, as one that fell silent.")
        .def("lose_connection", &LivenessProbe::lose_connection, "rank"_a, "now_ms"_a,
             "The provider reports that rank unreachable.")
        .def("take_deaths", &LivenessProbe::take_deaths, "Ranks whose work the engine is to end, since the last call.")
        .def("tick", &LivenessProbe::tick, "now_ms"_a, "Look around.")
        .def("fault", &LivenessProbe::fault, "None, or (rank at fault, rank that told or -1, why).")
        .def("state", &LivenessProbe::state, "rank"_a)
        .def("undecided", &LivenessProbe::undecided, "rank"_a, "since_ms"_a);
}

}  // namespace expertwire
