#include "provider/counted.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "engine/mutants.hpp"

namespace expertwire {

namespace {

constexpr std::uint32_t tags_in_reserve = 64;  // below it requests are gated, so that it never comes to pushing back
constexpr std::size_t held_max = 32;           // acknowledgements that may wait for an answer to go with

// Who sent what: question → number; signal, dead → answers.
enum class Kind : std::uint32_t { question = 1, number, signal, dead, answers };

struct Header {
    Kind kind = Kind::question;
    std::uint32_t number = 0;
    std::uint32_t first = 0;     // number: tags; signal: how many tags follow; dead: its tag; answers: acknowledgements
    std::uint32_t second = 0;    // dead: its use; answers: of signals
    std::uint64_t question = 0;  // question, number
};
static_assert(sizeof(Header) == 24);

struct Listed {
    std::uint16_t tag = 0;
    std::uint16_t use = 0;
};

struct WireAnswer {
    std::uint64_t ticket = 0;
    std::uint32_t status = 0;
    std::uint32_t reserved = 0;
};

constexpr std::uint8_t illegal = 0xff;
using TagTable = std::array<std::array<std::uint8_t, 4>, 3>;

constexpr TagTable make_tag_table() {
    TagTable table{};
    for (auto& row : table) row.fill(illegal);
    const auto allow = [&table](TagState from, TagEvent event, TagState to) {
        table[static_cast<std::size_t>(from)][static_cast<std::size_t>(event)] = static_cast<std::uint8_t>(to);
    };
    allow(TagState::free, TagEvent::post, TagState::out);
    allow(TagState::out, TagEvent::undo, TagState::free);
    allow(TagState::out, TagEvent::acknowledge, TagState::free);
    allow(TagState::out, TagEvent::abandon, TagState::orphan);
    allow(TagState::orphan, TagEvent::acknowledge, TagState::free);
    return table;
}
constexpr TagTable tag_table = make_tag_table();

template <class Value>
void append(std::vector<std::byte>& bytes, const Value& value) {
    const auto* first = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), first, first + sizeof value);
}

// The next Value of a message; false where it ends before.
template <class Value>
bool take(std::span<const std::byte>& bytes, Value& value) {
    if (bytes.size() < sizeof value) return false;
    std::memcpy(&value, bytes.data(), sizeof value);
    bytes = bytes.subspan(sizeof value);
    return true;
}

constexpr std::uint32_t immediate_of(std::uint32_t number, std::uint32_t tag) {
    return number << 16 | tag;
}

}  // namespace

Counting::Counting(std::uint32_t tags, std::size_t message_bytes_max, std::uint32_t patience,
                   std::function<Status(PeerId, const CountedSignal&)> apply)
    : tags_(std::clamp(tags, 1u, counted_tags_max)),
      message_bytes_max_(message_bytes_max),
      patience_(patience),
      apply_(std::move(apply)) {}

bool Counting::advance(Tag& tag, TagEvent event) {
    const std::uint8_t to = tag_table[static_cast<std::size_t>(tag.state)][static_cast<std::size_t>(event)];
    if (to == illegal) return false;
    tag.state = static_cast<TagState>(to);
    return true;
}

// ---- the source

Counting::Source& Counting::source_of(PeerId peer) {
    if (sources_.size() <= peer.value) sources_.resize(peer.value + 1);
    if (!sources_[peer.value]) sources_[peer.value] = std::make_unique<Source>();
    return *sources_[peer.value];
}

Counting::Tag* Counting::tag_of(PeerId peer, std::uint32_t immediate) {
    if (peer.value >= sources_.size() || !sources_[peer.value]) return nullptr;
    Source& source = *sources_[peer.value];
    const std::uint32_t tag = immediate & 0xffff;
    if (source.number != immediate >> 16 || tag >= source.tags.size()) return nullptr;
    return &source.tags[tag];
}

// A peer that does not know us yet drops the question: it is asked again at every attempt that doubles their number.
void Counting::ask(PeerId peer, Source& source) {
    if (source.attempts++ < source.ask_at) return;
    source.ask_at = 2 * source.ask_at + 1;
    if (source.question == 0) source.question = ++questions_;
    Outgoing& out = outbox_.emplace_back();
    out.peer = peer;
    append(out.bytes, Header{.kind = Kind::question, .question = source.question});
}

bool Counting::counts(PeerId peer) {
    Source& source = source_of(peer);
    if (!source.number) ask(peer, source);
    return source.number && source.free.size() >= std::min<std::size_t>(tags_in_reserve, source.tags.size() / 2 + 1);
}

std::optional<std::uint32_t> Counting::begin_write(PeerId peer, Ticket write, Ticket request) {
    Source& source = source_of(peer);
    if (!source.number) ask(peer, source);
    if (!source.number || source.free.empty()) return std::nullopt;
    if (request.valid()) {
        if (groups_.size() <= request.slot) groups_.resize(request.slot + 1);
        Group& group = groups_[request.slot];
        if (group.generation != request.generation) group = {request.generation, 0, none};
        if (group.first != none && group.number != *source.number) return std::nullopt;  // never acknowledged
        group.number = *source.number;
    }
    const std::uint32_t index = source.free.back();
    source.free.pop_back();
    Tag& tag = source.tags[index];
    advance(tag, TagEvent::post);
    ++tag.use;
    tag.write = write;
    tag.request = request;
    tag.previous = tag.next = none;
    if (request.valid()) {
        Group& group = groups_[request.slot];
        tag.next = group.first;
        if (group.first != none) source.tags[group.first].previous = index;
        group.first = index;
    }
    return immediate_of(*source.number, index);
}

// Links of a request that is gone stay as they are among its tags; only the head is another's by then.
void Counting::unlink(Source& source, Tag& tag) {
    if (!tag.request.valid()) return;
    if (tag.previous != none) {
        source.tags[tag.previous].next = tag.next;
    } else if (groups_[tag.request.slot].generation == tag.request.generation) {
        groups_[tag.request.slot].first = tag.next;
    }
    if (tag.next != none) source.tags[tag.next].previous = tag.previous;
    tag.previous = tag.next = none;
    tag.request = Ticket{};
}

void Counting::release(Source& source, std::uint32_t index) {
    unlink(source, source.tags[index]);
    source.tags[index].write = Ticket{};
    source.free.push_back(static_cast<std::uint16_t>(index));
}

void Counting::undo_write(PeerId peer, std::uint32_t immediate) {
    Tag* tag = tag_of(peer, immediate);
    if (tag == nullptr || !advance(*tag, TagEvent::undo)) return;
    --tag->use;
    release(*sources_[peer.value], immediate & 0xffff);
}

void Counting::abandon_write(PeerId peer, std::uint32_t immediate) {
    Tag* tag = tag_of(peer, immediate);
    if (tag == nullptr || !advance(*tag, TagEvent::abandon)) return;
    Outgoing& out = outbox_.emplace_back();
    out.peer = peer;
    append(out.bytes, Header{.kind = Kind::dead,
                             .number = immediate >> 16,
                             .first = immediate & 0xffff,
                             .second = tag->use,
                             .question = 0});
    if (mutant(Mutant::tag_freed_at_failure) && advance(*tag, TagEvent::acknowledge)) {
        release(*sources_[peer.value], immediate & 0xffff);
    }
}

std::optional<std::size_t> Counting::encode_signal(PeerId peer, Ticket request, const CountedSignal& signal,
                                                   std::span<std::byte> out) {
    const bool known = request.slot < groups_.size() && groups_[request.slot].generation == request.generation;
    if (!known || groups_[request.slot].first == none) return 0;
    Source& source = source_of(peer);
    if (source.number != groups_[request.slot].number) return std::nullopt;  // the peer has forgotten us since
    Header header{.kind = Kind::signal, .number = *source.number};
    std::size_t at = sizeof header + sizeof signal;
    for (std::uint32_t index = groups_[request.slot].first; index != none; index = source.tags[index].next) {
        const Listed listed{static_cast<std::uint16_t>(index), source.tags[index].use};
        if (at + sizeof listed > out.size()) return std::nullopt;
        std::memcpy(out.data() + at, &listed, sizeof listed);
        at += sizeof listed;
        ++header.first;
    }
    std::memcpy(out.data(), &header, sizeof header);
    std::memcpy(out.data() + sizeof header, &signal, sizeof signal);
    return at;
}

void Counting::number_given(PeerId from, std::uint64_t question, std::uint32_t number, std::uint32_t tags) {
    Source& source = source_of(from);
    if (source.number || question != source.question || number >= counted_tags_max || tags == 0 ||
        tags > counted_tags_max) {
        ++counters_.dropped;
        return;
    }
    source.number = number;
    source.tags.assign(tags, Tag{});
    source.free.clear();
    for (std::uint32_t index = tags; index-- > 0;) source.free.push_back(static_cast<std::uint16_t>(index));
}

void Counting::answered(PeerId from, std::uint32_t number, std::span<const std::byte> bytes) {
    Header header;
    take(bytes, header);
    for (std::uint32_t i = 0; i < header.first; ++i) {
        std::uint16_t index = 0;
        if (!take(bytes, index)) break;
        Tag* tag = tag_of(from, immediate_of(number, index));
        if (tag == nullptr) continue;
        const bool owned = tag->state == TagState::out;
        if (!advance(*tag, TagEvent::acknowledge)) {
            ++counters_.dropped;
            continue;
        }
        if (owned) ended_.push_back({tag->write, false, Status::ok});
        release(*sources_[from.value], index);
    }
    for (std::uint32_t i = 0; i < header.second; ++i) {
        WireAnswer answer;
        if (!take(bytes, answer)) return;
        const auto status = static_cast<Status>(answer.status);
        if (status == Status::stale && from.value < sources_.size() && sources_[from.value] &&
            sources_[from.value]->number == number) {
            // The peer has forgotten us since: a new number, and what is still out under the old one is never answered.
            *sources_[from.value] = Source{};
        }
        ended_.push_back({Ticket::unpack(answer.ticket), true, status == Status::stale ? Status::aborted : status});
    }
}

// ---- the target

void Counting::asked(PeerId from, std::uint64_t question) {
    std::uint32_t number = none;
    for (std::uint32_t i = 0; i < targets_.size(); ++i) {
        if (!targets_[i] || targets_[i]->peer != from) continue;
        if (targets_[i]->question > question) return;  // overtaken by a later one
        if (targets_[i]->question == question) {
            number = i;
        } else {
            targets_[i].reset();
        }
    }
    if (number == none) {
        if (targets_.size() >= counted_tags_max) return;  // all were given out: requests from there stay gated
        number = static_cast<std::uint32_t>(targets_.size());
        targets_.push_back(std::make_unique<Target>());
        targets_[number]->peer = from;
        targets_[number]->incarnation = from.value < incarnations_.size() ? incarnations_[from.value] : 0;
        targets_[number]->question = question;
        targets_[number]->arrivals.resize(tags_);
    }
    Outgoing& out = outbox_.emplace_back();
    out.peer = from;
    append(out.bytes,
           Header{.kind = Kind::number, .number = number, .first = tags_, .second = 0, .question = question});
}

void Counting::immediate(std::uint32_t data) {
    Target* target = target_of(data >> 16);
    const std::uint32_t tag = data & 0xffff;
    ++counters_.immediates;
    if (target == nullptr || tag >= target->arrivals.size()) {
        ++counters_.strays;
        return;
    }
    Arrival& arrival = target->arrivals[tag];
    ++arrival.uses;
    arrival.state = ArrivalState::awaited;
    target->acknowledged.push_back(static_cast<std::uint16_t>(tag));
    list(*target, data >> 16);
    const std::uint32_t waiting = std::exchange(arrival.waiting, none);
    if (waiting == none) return;
    if (--target->waiting[waiting].missing > (mutant(Mutant::count_one_fewer) ? 1u : 0u)) return;
    const CountedSignal signal = target->waiting[waiting].signal;
    end_waiting(*target, waiting);
    add(*target, data >> 16, signal);
}

void Counting::signalled(PeerId from, std::uint32_t number, std::span<const std::byte> bytes) {
    Header header;
    CountedSignal signal;
    take(bytes, header);
    if (!take(bytes, signal) || bytes.size() < std::size_t{header.first} * sizeof(Listed)) {
        ++counters_.dropped;
        return;
    }
    Target* target = target_of(number);
    if (target == nullptr || target->peer != from) {  // it was forgotten here, and does not know
        Outgoing& out = outbox_.emplace_back();
        out.peer = from;
        append(out.bytes, Header{.kind = Kind::answers, .number = number, .first = 0, .second = 1, .question = 0});
        append(out.bytes, WireAnswer{signal.ticket, static_cast<std::uint32_t>(Status::stale), 0});
        return;
    }
    Waiting waiting{signal, 0, {}};
    bool lost = false;
    for (std::uint32_t i = 0; i < header.first; ++i) {
        Listed listed;
        take(bytes, listed);
        if (listed.tag >= target->arrivals.size()) {
            lost = true;
            continue;
        }
        const Arrival& arrival = target->arrivals[listed.tag];
        const auto ahead = static_cast<std::int16_t>(static_cast<std::uint16_t>(listed.use - arrival.uses));
        if (ahead <= 0) continue;  // it has come
        // One use ahead at most: a tag is used again only when this side has acknowledged it.
        lost = lost || ahead > 1 || arrival.state == ArrivalState::dead || arrival.waiting != none;
        waiting.tags.push_back(listed.tag);
    }
    waiting.missing = static_cast<std::uint32_t>(waiting.tags.size());
    if (lost) {
        ++counters_.signals_aborted;
        return tell(*target, number, {signal.ticket, Status::aborted});
    }
    if (waiting.missing <= (mutant(Mutant::count_one_fewer) ? 1u : 0u)) return add(*target, number, signal);
    wait(*target, std::move(waiting));
}

// Its message was copied: one whose immediates are late holds no receive buffer.
void Counting::wait(Target& target, Waiting waiting) {
    ++counters_.signals_waited;
    if (target.free_waiting.empty()) {
        target.free_waiting.push_back(static_cast<std::uint32_t>(target.waiting.size()));
        target.waiting.emplace_back();
    }
    const std::uint32_t index = target.free_waiting.back();
    target.free_waiting.pop_back();
    for (const std::uint16_t tag : waiting.tags) target.arrivals[tag].waiting = index;
    target.waiting[index] = std::move(waiting);
}

void Counting::end_waiting(Target& target, std::uint32_t index) {
    for (const std::uint16_t tag : target.waiting[index].tags) {
        if (target.arrivals[tag].waiting == index) target.arrivals[tag].waiting = none;
    }
    target.waiting[index].tags.clear();
    target.free_waiting.push_back(index);
}

void Counting::add(Target& target, std::uint32_t number, const CountedSignal& signal) {
    ++counters_.signals_added;
    tell(target, number, {signal.ticket, apply_(target.peer, signal)});
}

void Counting::declared_dead(std::uint32_t number, std::span<const std::byte> bytes) {
    Header header;
    take(bytes, header);
    Target* target = target_of(number);
    if (target == nullptr || header.first >= target->arrivals.size()) return;
    Arrival& arrival = target->arrivals[header.first];
    if (static_cast<std::uint16_t>(arrival.uses + 1) != header.second) return;  // it has come after all
    arrival.state = ArrivalState::dead;
    if (arrival.waiting == none) return;
    const std::uint32_t waiting = arrival.waiting;
    const std::uint64_t ticket = target->waiting[waiting].signal.ticket;
    end_waiting(*target, waiting);
    ++counters_.signals_aborted;
    tell(*target, number, {ticket, Status::aborted});
}

void Counting::tell(Target& target, std::uint32_t number, Answer answer) {
    target.answers.push_back(answer);
    list(target, number);
}

void Counting::list(Target& target, std::uint32_t number) {
    if (std::exchange(target.listed, true)) return;
    target.listed_at = turns_;
    unanswered_.push_back(number);
}

// ---- messages

void Counting::message(PeerId from, std::span<const std::byte> bytes) {
    Header header;
    std::span<const std::byte> rest = bytes;
    if (!take(rest, header)) {
        ++counters_.dropped;
        return;
    }
    switch (header.kind) {
        case Kind::question:
            return asked(from, header.question);
        case Kind::number:
            return number_given(from, header.question, header.number, header.first);
        case Kind::signal:
            return signalled(from, header.number, bytes);
        case Kind::dead:
            return declared_dead(header.number, bytes);
        case Kind::answers:
            return answered(from, header.number, bytes);
    }
    ++counters_.dropped;
}

bool Counting::waits(const Target& target) const {
    return target.answers.empty() && target.acknowledged.size() < held_max && turns_ - target.listed_at < patience_;
}

// All that one turn has to tell one source, in as few messages as it fits.
void Counting::collect(std::uint32_t number) {
    Target* target = target_of(number);
    if (target == nullptr) return;  // retired since
    target->listed = false;
    std::size_t tag = 0, answer = 0;
    while (tag < target->acknowledged.size() || answer < target->answers.size()) {
        std::size_t room = message_bytes_max_ - sizeof(Header);
        const std::size_t tags = std::min(target->acknowledged.size() - tag, room / sizeof(std::uint16_t));
        room -= tags * sizeof(std::uint16_t);
        const std::size_t answers = std::min(target->answers.size() - answer, room / sizeof(WireAnswer));
        Outgoing& out = outbox_.emplace_back();
        out.peer = target->peer;
        append(out.bytes, Header{.kind = Kind::answers,
                                 .number = number,
                                 .first = static_cast<std::uint32_t>(tags),
                                 .second = static_cast<std::uint32_t>(answers),
                                 .question = 0});
        for (const std::size_t end = tag + tags; tag < end; ++tag) append(out.bytes, target->acknowledged[tag]);
        for (const std::size_t end = answer + answers; answer < end; ++answer) {
            const Answer& each = target->answers[answer];
            append(out.bytes, WireAnswer{each.ticket, static_cast<std::uint32_t>(each.status), 0});
        }
    }
    target->acknowledged.clear();
    target->answers.clear();
}

const Counting::Outgoing* Counting::front() {
    std::erase_if(unanswered_, [&](std::uint32_t number) {
        const Target* target = target_of(number);
        if (target != nullptr && waits(*target)) return false;
        collect(number);
        return true;
    });
    return outbox_.empty() ? nullptr : &outbox_.front();
}

void Counting::postpone() {
    outbox_.push_back(std::move(outbox_.front()));
    outbox_.pop_front();
}

void Counting::meet(PeerId peer, std::uint64_t incarnation) {
    if (incarnations_.size() <= peer.value) incarnations_.resize(peer.value + 1);
    incarnations_[peer.value] = incarnation;
    for (std::unique_ptr<Target>& target : targets_) {
        if (target && target->peer == peer && target->incarnation != incarnation) target.reset();
    }
}

void Counting::leave(PeerId peer) {
    if (peer.value < sources_.size()) sources_[peer.value].reset();
    std::erase_if(outbox_, [&](const Outgoing& out) { return out.peer == peer; });
}

}  // namespace expertwire
