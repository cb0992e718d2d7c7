#include "exchange/combine.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace expertwire::exchange {

namespace {

constexpr std::uint64_t kCopyBytes = 256 << 10;  // of input between two words that say so
constexpr std::uint64_t kStreamBytes = 1 << 10;  // output rows from here on bypass the caches

}  // namespace

Combine::Combine(Exchange& exchange, const CombineRequest& request)
    : Operation(exchange, Kind::combine, request.handle),
      request_(request),
      routing_(*request.handle),
      columns_(request.row_bytes / 2),
      store_(request.row_bytes >= kStreamBytes ? rows::Store::streaming : rows::Store::cached),
      chunk_(combine_chunk(exchange.shape().slot_bytes, request.row())) {
    NotifyHeader header;
    header.row_bytes = request_.row_bytes;
    header.topk = request_.topk;
    header.tokens = routing_.tokens;
    header.has_weights = request_.topk > 0;
    header.offer_offset = request_.offer_offset;
    header.offer_capacity = request_.offer_capacity;
    place_input(header);
    const std::vector<std::uint64_t> no_experts(std::size_t{routing_.ranks} + 1, 0);
    send_notify(header, routing_.matrix.data() + std::size_t{routing_.rank} * routing_.ranks,
                routing_.node_matrix.data() + std::size_t{routing_.rank} * routing_.nodes, nullptr, no_experts);
}

// Where my node finds my input: where it is if that is in my data region, else in the offered extent, once copied.
void Combine::place_input(NotifyHeader& header) {
    const std::byte* const data = exchange_.mine().data;
    const auto inside = [&](const std::byte* at, std::uint64_t bytes) {
        return bytes == 0 || (at >= data && at + bytes <= data + exchange_.data_bytes());
    };
    const auto* const weights = reinterpret_cast<const std::byte*>(request_.weights);
    const std::uint64_t weight_bytes = request_.rows * request_.topk * sizeof(float);
    find_stretches();
    copies_rows_ = !stretches_.empty() && !inside(request_.x, request_.rows * request_.row_bytes);
    copies_weights_ = !stretches_.empty() && !inside(weights, weight_bytes);
    if (!copies_rows_ && !copies_weights_) stretches_.clear();
    const std::uint64_t rows_needed = copies_rows_ ? request_.rows : 0;
    const Extent extent = combine_extent(rows_needed, {request_.row_bytes});
    rows_offset_ = request_.offer_offset;
    weights_offset_ = request_.offer_offset + extent.weights;
    if (!copies_rows_ && request_.rows > 0 && inside(request_.x, request_.rows * request_.row_bytes)) {
        rows_offset_ = static_cast<std::uint64_t>(request_.x - data);
        sends_whole_ = exchange_.nodes().size(exchange_.node()) == 1;
    }
    if (!copies_weights_ && weight_bytes > 0 && inside(weights, weight_bytes)) {
        weights_offset_ = static_cast<std::uint64_t>(weights - data);
    }
    header.offer_needed = copies_rows_ || copies_weights_ ? extent.bytes + (copies_weights_ ? weight_bytes : 0) : 0;
    if (header.offer_needed > request_.offer_capacity) fit_window(header);
    header.rows_offset = rows_offset_;
    header.weights_offset = weights_offset_;
}

// Too small for all of it: rows pass through the extent in turn, each copied over one that has been read. Nobody can
// wait in a circle: rows are numbered by (home, token), each reader reads a home's rows in that order, and whatever a
// row waits for is of a lower home or of an earlier chunk of its own.
void Combine::fit_window(NotifyHeader& header) {
    const std::uint64_t rows = combine_window(request_.offer_capacity, request_.row());
    if (rows == 0) {
        header.offer_needed = combine_extent(1, request_.row()).bytes;  // more than there is: every rank says so
        return;
    }
    copies_rows_ = true;
    copies_weights_ = request_.topk > 0;
    sends_whole_ = false;
    window_ = header.window_rows = rows;
    const Extent extent = combine_extent(rows, request_.row());
    rows_offset_ = request_.offer_offset;
    weights_offset_ = request_.offer_offset + extent.weights;
    header.offer_needed = extent.bytes;
}

// Rows are ordered by home. Those of a home are read by the home itself if it is in my node, else by its entry here;
// what I read myself, I read where it is.
void Combine::find_stretches() {
    const NodeTable& nodes = exchange_.nodes();
    const std::uint32_t me = exchange_.rank();
    for (std::uint32_t home = 0; home < routing_.ranks; ++home) {
        const std::uint64_t count = routing_.rows(home, me);
        const bool near = nodes.node_of(home) == exchange_.node();
        const std::uint32_t reader = near ? home : nodes.entry(home, exchange_.node());
        if (count == 0 || reader == me) continue;
        const std::uint64_t begin = routing_.offset(home, me);
        stretches_.push_back({home, begin, begin + count});
    }
}

// ---- begin: every rank's notify is here

void Combine::begin() {
    open_inputs();
    open_rings();
    sum_rows_.reserve(routing_.ranks);
    sum_weights_.reserve(routing_.ranks);
    sum_ends_.reserve(routing_.nodes);
}

void Combine::open_inputs() {
    for (const std::uint32_t rank : exchange_.nodes().members(exchange_.node())) {
        Input input;
        input.rank = rank;
        const NotifyHeader& header = notify(rank);
        if (rank == exchange_.rank()) {
            input.rows = request_.x;
            input.weights = reinterpret_cast<const std::byte*>(request_.weights);
            input.complete = true;
        } else {
            input.rows = exchange_.port().memory()[rank].data + header.rows_offset;
            input.weights = exchange_.port().memory()[rank].data + header.weights_offset;
            input.complete = header.offer_needed == 0;
            if (header.window_rows > 0) input.window = header.window_rows;
        }
        input.first = input.next = routing_.offset(exchange_.rank(), rank);
        inputs_.push_back(input);
    }
}

void Combine::open_rings() {
    const NodeTable& nodes = exchange_.nodes();
    for (std::uint32_t home = 0; home < routing_.ranks; ++home) {
        const std::uint64_t count = routing_.node_rows(home, exchange_.node());
        if (nodes.node_of(home) == exchange_.node() || count == 0) continue;
        if (nodes.entry(home, exchange_.node()) != exchange_.rank()) continue;
        Outgoing out{SendRing(exchange_, inner_sender(exchange_, home), epoch_, chunks_for(count, chunk_.capacity)),
                     home,
                     0,
                     count,
                     0,
                     nullptr,
                     {},
                     std::vector<std::uint64_t>(inputs_.size(), 0)};
        for (const Input& input : inputs_) out.next.push_back(routing_.offset(home, input.rank));
        outgoing_.push_back(std::move(out));
    }
    for (std::uint32_t node = 0; node < routing_.nodes; ++node) {
        const std::uint64_t count = routing_.node_rows(exchange_.rank(), node);
        if (node == exchange_.node() || count == 0) continue;
        incoming_.push_back(
            {ReceiveRing(exchange_, outer_receiver(exchange_, node), epoch_), node, count, 0, nullptr, 0, 0});
    }
}

// ---- moving

std::uint64_t Combine::move(std::uint64_t budget) {
    std::uint64_t moved = copy_in(budget);
    for (std::size_t i = 0; i < outgoing_.size() && moved < budget; ++i) {
        Outgoing& out = outgoing_[(turn_ + i) % outgoing_.size()];
        moved += sends_whole_ ? send_whole(out, budget - moved) : reduce_for(out, budget - moved);
        tell_read(out);
    }
    if (!outgoing_.empty()) turn_ = (turn_ + 1) % outgoing_.size();
    for (Incoming& in : incoming_) moved += in.ring.flush() ? 1 : 0;
    if (moved < budget) moved += reduce_home(budget - moved);
    finish_reading();
    for (Outgoing& out : outgoing_) {
        out.ring.reap();
        if (out.ring.failure() == Status::ok) continue;
        fail(FailureReason::put, out.ring.peer(), "sums could not be delivered", out.ring.failure());
    }
    return moved;
}

std::uint64_t Combine::copy_in(std::uint64_t budget) {
    std::uint64_t moved = 0;
    std::byte* const data = exchange_.mine().data;
    const std::uint64_t weight_bytes = request_.topk * sizeof(float);
    while (stretch_ < stretches_.size() && moved < budget) {
        const Stretch& stretch = stretches_[stretch_];
        const std::uint64_t row = std::max(copied_, stretch.begin);
        std::uint64_t count = std::min(stretch.end - row, std::max<std::uint64_t>(1, kCopyBytes / request_.row_bytes));
        const std::uint64_t slot = slot_of(row, window_);
        if (window_ != kUnbounded) {
            const std::uint64_t room = freed() + window_;
            if (row >= room) return moved;
            count = std::min({count, room - row, window_ - slot});
        }
        if (copies_rows_) {
            rows::copy(data + rows_offset_ + slot * request_.row_bytes, request_.x + row * request_.row_bytes,
                       count * request_.row_bytes, rows::Store::streaming);
        }
        if (copies_weights_) {
            rows::copy(data + weights_offset_ + slot * weight_bytes,
                       reinterpret_cast<const std::byte*>(request_.weights) + row * weight_bytes, count * weight_bytes,
                       rows::Store::cached);
        }
        moved += count * request_.row_bytes;
        copied_ = row + count;
        if (copied_ == stretch.end) ++stretch_;
        rows::fence();
        for (const Input& input : inputs_) {
            if (input.rank != exchange_.rank())
                publish(input.rank, exchange_.layout().ready(exchange_.rank()), copied_);
        }
    }
    return moved;
}

// Rows of my input below this have been read by whoever reads them, or are read by myself, where they are.
std::uint64_t Combine::freed() {
    if (mutant(Mutant::no_wait_for_readers)) return request_.rows;
    for (; freed_stretch_ < stretches_.size(); ++freed_stretch_) {
        const Stretch& stretch = stretches_[freed_stretch_];
        const std::uint64_t read = count_at(exchange_.layout().consumed(stretch.home));
        if (stretch.begin + read < stretch.end) return stretch.begin + read;
    }
    return request_.rows;
}

// Whose input passes through a window is told how far it has been read.
void Combine::tell_read() {
    for (Input& input : inputs_) {
        const std::uint64_t read = input.next - input.first;
        if (input.window == kUnbounded || read == input.told) continue;
        publish(input.rank, exchange_.layout().consumed(exchange_.rank()), read);
        input.told = read;
    }
}

void Combine::tell_read(Outgoing& out) {
    for (std::size_t index = 0; index < inputs_.size(); ++index) {
        const Input& input = inputs_[index];
        if (input.window == kUnbounded) continue;
        const std::uint64_t read = out.next[index] - routing_.offset(out.home, input.rank);
        if (read == out.told[index]) continue;
        publish(input.rank, exchange_.layout().consumed(out.home), read);
        out.told[index] = read;
    }
}

bool Combine::readable(Input& input, std::uint64_t row) {
    if (input.complete || row < input.available) return true;
    input.available = count_at(exchange_.layout().ready(input.rank));
    return row < input.available;
}

void Combine::add_row(const std::byte* row, const std::byte* weights) {
    sum_rows_.push_back(row);
    if (request_.topk > 0) sum_weights_.push_back(weights);
}

rows::Sum Combine::sum_of(const std::vector<const std::byte*>& rows) const {
    rows::Sum sum;
    sum.rows = rows.data();
    sum.ends = sum_ends_.data();
    sum.groups = static_cast<std::uint32_t>(sum_ends_.size());
    return sum;
}

// ---- for a home in another node

std::uint64_t Combine::reduce_for(Outgoing& out, std::uint64_t budget) {
    std::uint64_t moved = out.ring.flush() ? 1 : 0;
    const std::uint64_t words = exchange_.nodes().mask_words(exchange_.node());
    const std::uint64_t weight_bytes = request_.topk * sizeof(float);
    const std::uint64_t* const masks = routing_.masks[out.home].data();
    while (out.token < out.tokens && moved < budget) {
        if (out.slot == nullptr) out.slot = out.ring.open();
        if (out.slot == nullptr) return moved;
        sum_rows_.clear();
        sum_weights_.clear();
        for (std::uint64_t word = 0; word < words; ++word) {
            for (std::uint64_t mask = masks[out.token * words + word]; mask != 0; mask &= mask - 1) {
                const std::size_t index = word * 64 + static_cast<std::size_t>(std::countr_zero(mask));
                Input& input = inputs_[index];
                if (!readable(input, out.next[index])) return moved;
                add_row(row_at(input, out.next[index]), weights_at(input, out.next[index]));
            }
        }
        sum_ends_.assign(1, static_cast<std::uint32_t>(sum_rows_.size()));
        rows::reduce(out.slot + chunk_.rows + out.filled * request_.row_bytes, sum_of(sum_rows_), columns_,
                     rows::Store::cached);
        if (request_.topk > 0) {
            rows::reduce_f32(reinterpret_cast<float*>(out.slot + chunk_.weights + out.filled * weight_bytes),
                             sum_of(sum_weights_), request_.topk);
        }
        for (std::uint64_t word = 0; word < words; ++word) {
            for (std::uint64_t mask = masks[out.token * words + word]; mask != 0; mask &= mask - 1) {
                ++out.next[word * 64 + static_cast<std::size_t>(std::countr_zero(mask))];
            }
        }
        moved += (sum_rows_.size() + 1) * request_.row_bytes;
        ++out.token;
        ++out.filled;
        if (out.filled == chunk_.capacity || out.token == out.tokens) {
            close_chunk(out, chunk_.bytes(out.filled, request_.row_bytes));
        }
    }
    return moved;
}

// The rows of a home lie behind each other here, one for each of its tokens. A sum of one row may differ from the row
// in the sign of a zero and in which NaN it is; the home's sum, which begins at +0, is the same bits for both.
std::uint64_t Combine::send_whole(Outgoing& out, std::uint64_t budget) {
    std::uint64_t moved = out.ring.flush() ? 1 : 0;
    while (out.token < out.tokens && moved < budget) {
        out.slot = out.ring.open();
        if (out.slot == nullptr) return moved;
        const std::uint64_t first = out.next.front();
        out.filled = static_cast<std::uint32_t>(std::min<std::uint64_t>(chunk_.capacity, out.tokens - out.token));
        const std::uint64_t bytes = out.filled * request_.row_bytes;
        if (request_.topk > 0) {
            std::memcpy(out.slot + chunk_.weights, request_.weights + first * request_.topk,
                        out.filled * request_.topk * sizeof(float));
        }
        out.next.front() += out.filled;
        out.token += out.filled;
        close_chunk(out, chunk_.rows,
                    {Region::data, rows_offset_ + first * request_.row_bytes, Region::staging,
                     out.ring.peer_slot() + chunk_.rows, bytes});
        moved += bytes;
    }
    return moved;
}

void Combine::close_chunk(Outgoing& out, std::uint64_t bytes, const Port::Piece& apart) {
    const ChunkHeader header{epoch_, static_cast<std::uint32_t>(out.token - out.filled), out.filled,
                             static_cast<std::uint32_t>(out.tokens)};
    std::memcpy(out.slot, &header, sizeof header);
    out.ring.close(bytes, apart);
    out.filled = 0;
    out.slot = nullptr;
}

// ---- at home

bool Combine::load_chunk(Incoming& in) {
    const std::byte* const chunk = in.ring.front();
    if (chunk == nullptr) return false;
    ChunkHeader header;
    std::memcpy(&header, chunk, sizeof header);
    if (header.epoch != epoch_ || header.first_row != in.rows_read || header.rows == 0 ||
        header.rows > chunk_.capacity || header.rows > in.rows_left) {
        fail(FailureReason::protocol, in.ring.peer(),
             "a chunk of sums from rank " + std::to_string(in.ring.peer()) + " holds rows " +
                 std::to_string(header.first_row) + " + " + std::to_string(header.rows) + " of call " +
                 std::to_string(header.epoch) + ", expected row " + std::to_string(in.rows_read) + " of call " +
                 std::to_string(epoch_));
        return false;
    }
    in.chunk = chunk;
    in.rows = header.rows;
    in.row = 0;
    return true;
}

Combine::Taken Combine::take_near(const std::uint8_t* present) {
    Taken taken = Taken::no;
    for (Input& input : inputs_) {
        if (!present[input.rank]) continue;
        if (!readable(input, input.next)) return Taken::blocked;
        add_row(row_at(input, input.next), weights_at(input, input.next));
        taken = Taken::yes;
    }
    return taken;
}

Combine::Taken Combine::take_far(Incoming& in, const std::uint8_t* present) {
    const std::vector<std::uint32_t>& members = exchange_.nodes().members(in.node);
    if (std::none_of(members.begin(), members.end(), [&](std::uint32_t rank) { return present[rank] != 0; })) {
        return Taken::no;
    }
    if (in.chunk == nullptr && !load_chunk(in)) return Taken::blocked;
    add_row(in.chunk + chunk_.rows + in.row * request_.row_bytes,
            in.chunk + chunk_.weights + in.row * request_.topk * sizeof(float));
    return Taken::yes;
}

// Collects the rows of one token, a group for each node that has any, nodes ascending.
Combine::Taken Combine::take_token(std::uint64_t token) {
    const std::uint8_t* const present = routing_.in_rank.data() + token * routing_.ranks;
    sum_rows_.clear();
    sum_weights_.clear();
    sum_ends_.clear();
    std::size_t far = 0;
    for (std::uint32_t node = 0; node < routing_.nodes; ++node) {
        Taken taken = Taken::no;
        if (node == exchange_.node()) {
            taken = take_near(present);
        } else if (far < incoming_.size() && incoming_[far].node == node) {
            taken = take_far(incoming_[far++], present);
        }
        if (taken == Taken::blocked) return taken;
        if (taken == Taken::yes) sum_ends_.push_back(static_cast<std::uint32_t>(sum_rows_.size()));
    }
    return Taken::yes;
}

void Combine::advance(std::uint64_t token) {
    const std::uint8_t* const present = routing_.in_rank.data() + token * routing_.ranks;
    for (Input& input : inputs_) input.next += present[input.rank] != 0;
    for (Incoming& in : incoming_) {
        const std::vector<std::uint32_t>& members = exchange_.nodes().members(in.node);
        if (std::none_of(members.begin(), members.end(), [&](std::uint32_t rank) { return present[rank] != 0; }))
            continue;
        --in.rows_left;
        ++in.rows_read;
        if (++in.row < in.rows) continue;
        in.chunk = nullptr;
        in.ring.pop();
    }
}

std::uint64_t Combine::reduce_home(std::uint64_t budget) {
    std::uint64_t moved = 0;
    while (token_ < routing_.tokens && moved < budget) {
        if (take_token(token_) == Taken::blocked) break;
        rows::Sum sum = sum_of(sum_rows_);
        if (request_.bias0 != nullptr) sum.bias0 = request_.bias0 + token_ * request_.row_bytes;
        if (request_.bias1 != nullptr) sum.bias1 = request_.bias1 + token_ * request_.row_bytes;
        rows::reduce(request_.out + token_ * request_.row_bytes, sum, columns_, store_);
        if (request_.topk > 0) {
            rows::reduce_f32(request_.out_weights + token_ * request_.topk, sum_of(sum_weights_), request_.topk);
        }
        moved += (sum_rows_.size() + 1) * request_.row_bytes;
        advance(token_);
        ++token_;
    }
    if (moved > 0) tell_read();
    return moved;
}

// ---- ending

// My node may reuse its input once I have summed all that I read of it.
void Combine::finish_reading() {
    if (reading_done_ || token_ < routing_.tokens) return;
    for (const Outgoing& out : outgoing_) {
        if (out.token < out.tokens) return;
    }
    rows::fence();
    reading_done_ = true;
    for (const Input& input : inputs_) {
        if (input.rank != exchange_.rank()) publish(input.rank, exchange_.layout().read_done(exchange_.rank()), 1);
    }
}

bool Combine::rows_done() const {
    if (!reading_done_ || stretch_ < stretches_.size()) return false;
    for (const Outgoing& out : outgoing_) {
        if (out.ring.sent() != out.ring.chunks()) return false;
    }
    return std::all_of(incoming_.begin(), incoming_.end(), [](const Incoming& in) { return in.ring.settled(); });
}

bool Combine::drained() {
    bool all = true;
    for (Outgoing& out : outgoing_) {
        all = out.ring.ended() && all;
        if (out.ring.failure() != Status::ok) {
            fail(FailureReason::put, out.ring.peer(), "sums could not be delivered", out.ring.failure());
        }
    }
    for (const Input& input : inputs_) {
        const bool mine = input.rank == exchange_.rank();
        all = (mine || count_at(exchange_.layout().read_done(input.rank)) != 0) && all;
    }
    return all;
}

std::uint64_t Combine::chunks_sent() const {
    std::uint64_t total = 0;
    for (const Outgoing& out : outgoing_) total += out.ring.sent();
    return total;
}

void Combine::describe(PeerProgress& row) const {
    for (const Incoming& in : incoming_) {
        if (in.ring.peer() != row.rank) continue;
        row.rows_expected += in.rows_read + in.rows_left;
        row.rows_arrived += in.rows_read;
        if (in.rows_left > 0) row.missing = "its node's sums";
    }
    for (const Outgoing& out : outgoing_) {
        if (out.ring.peer() != row.rank) continue;
        row.chunks_to_send += out.ring.chunks();
        row.chunks_sent += out.ring.sent();
        row.chunks_credited += out.ring.credited();
        if (out.ring.sent() < out.ring.chunks()) row.missing = "credit for my chunks, or rows of my node";
    }
    for (const Input& input : inputs_) {
        if (input.rank != row.rank || input.rank == exchange_.rank()) continue;
        const std::uint64_t readable_now =
            input.complete ? routing_.received(input.rank) : count_at(exchange_.layout().ready(input.rank));
        const std::uint64_t first = routing_.offset(exchange_.rank(), input.rank);
        row.rows_expected += routing_.rows(exchange_.rank(), input.rank);
        row.rows_arrived += std::clamp<std::uint64_t>(readable_now, first, first + row.rows_expected) - first;
        if (count_at(exchange_.layout().read_done(input.rank)) == 0) row.missing = "its reading of my rows";
        if (token_ < routing_.tokens && row.rows_arrived < row.rows_expected) row.missing = "its rows";
    }
}

}  // namespace expertwire::exchange
