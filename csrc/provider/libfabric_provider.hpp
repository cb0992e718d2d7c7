// The provider over libfabric. Private to libfabric*.cpp; open_libfabric() makes one.
#pragma once

#include <sys/types.h>

#include <array>
#include <cerrno>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "provider/address_book.hpp"
#include "provider/counted.hpp"
#include "provider/endpoint_names.hpp"
#include "provider/libfabric_objects.hpp"

namespace expertwire::fabric {

inline constexpr std::uint32_t kNotices = 32;  // revocations on their way at one time

// What a send says that may leave later: no room, or short of memory or descriptors (a connection takes one). Else the
// peer cannot be reached, and who removes it ends the waits for it.
inline bool passes(ssize_t outcome) {
    return outcome == -FI_EAGAIN || outcome == -FI_ENOMEM || outcome == -FI_ENOBUFS || outcome == -FI_EMFILE ||
           outcome == -ENFILE;
}

struct LocalRegion;

struct Peer {
    // unheard → settled: it has told where it is, and so knows us. What was posted before might go to an endpoint that
    // is closed, or be taken for another's. settled → draining → answering → settled: it has replaced its endpoints;
    // what we have on its way to the old ones drains, then we say so on every path there, then we go over to the new
    // ones. Operations are posted to a settled peer only.
    enum class Move : std::uint8_t { unheard, settled, draining, answering };
    // lost: held dead, or it has left; a stopped one may wake, so that what is to be said to it is kept.
    enum class Hope : std::uint8_t { live, lost };
    std::uint64_t instance = 0;
    std::vector<fi_addr_t> addresses;  // one for each of its endpoints
    std::uint32_t in_flight = 0;       // operations whose contexts libfabric still owns
    bool removed = false;
    Move move = Move::unheard;
    Hope hope = Hope::live;
    std::uint64_t move_number = 0;           // how often it has replaced its endpoints, as far as is known here
    std::uint64_t next_number = 0;           // of the move that `last_words` tell of
    std::uint32_t last_words = 0;            // that have come from its old endpoints
    std::uint32_t answers = 0;               // answering: last words of ours, one over each open endpoint, and …
    std::vector<std::uint32_t> answer_over;  // … those that have still to leave
    std::vector<fi_addr_t> next;             // while it moves: its new endpoints
    std::vector<fi_addr_t> before;           // those before the last move; freed late, their connections may hold bytes
    std::vector<std::byte> later;            // names of move next_number, all of whose last words came while it moves
    bool moves() const { return move == Move::draining || move == Move::answering; }
};

// What libfabric gets as the context of an operation. It owns `fi` from the post until the completion.
struct OperationContext {
    enum class Role : std::uint8_t { submission, receive, answer, notice };
    enum class State : std::uint8_t {
        idle,
        posted,             // one completion to come
        posted_unanswered,  // emulated signal, counted write: completion and answer to come
        unanswered,         // the same: sent, answer to come
        answered,           // the same: answer overtook the completion of its own send
    };
    fi_context2 fi{};  // first: its address is the context's
    Role role = Role::submission;
    State state = State::idle;
    Status answer = Status::ok;
    std::uint32_t index = 0;                 // slot, or number of the receive buffer
    std::uint32_t endpoint = 0;              // posted over it
    std::uint32_t set = 0;                   // receive, answer: the MessageSet that it belongs to
    std::uint32_t bounce = kNone;            // notification, counting signal: which send buffer it holds
    std::optional<std::uint32_t> immediate;  // counted write; none once it was acknowledged
    Ticket ticket;
    Level level = Level::delivered;
    Peer* peer = nullptr;
    LocalRegion* region = nullptr;  // whose bytes it reads or writes here
    RemoteRegionId remote;          // whose bytes it reads or writes there
    std::uint64_t operand = 0;      // atomic: read by the NIC until the completion
    MessageHeader message;          // emulated signal or answer
    static constexpr std::uint32_t kNone = 0xffff'ffff;
};

struct LocalRegion {
    enum class State : std::uint8_t { registered, revoking };
    Handle<fid_mr> registration;
    RegionSpec spec;
    void* descriptor = nullptr;
    std::uint32_t number = 0;  // registrations are numbered, so that a stale key is never taken for a new one
    std::uint32_t in_flight = 0;
    State state = State::registered;
    std::vector<std::uint64_t> unanswered;  // revoking: instances of peers that may still write
};

struct RemoteRegion {
    RemoteRegionId id;
    PeerId peer;
    RegionKey key;
    // asked → known or revoked: whose it is says whether the key is one of its own. Posts wait for that.
    enum class State : std::uint8_t { unknown, asked, known, revoked } state = State::unknown;
    std::uint32_t in_flight = 0;  // of what its row held before, too
};

// What one endpoint receives messages with.
struct MessageSet {
    std::vector<std::byte> memory;
    std::vector<OperationContext> receives;
    std::vector<OperationContext> answers;                    // one for each receive buffer
    Handle<fid_mr> memory_registration, answer_registration;  // MR_LOCAL
};

// Everything that libfabric opened. Members are in the order of opening; reverse order closes them.
struct Objects {
    Handle<fid_fabric> fabric;
    Handle<fid_domain> domain;
    std::vector<Handle<fid_cq>> queues;  // one for each set of endpoints
    AddressBook addresses;
    std::vector<std::byte> message_memory;   // send buffers, and behind them the words about replacements
    std::vector<OperationContext> contexts;  // slots
    std::vector<OperationContext> notices;   // kNotices
    Handle<fid_mr> message_registration, context_registration, notice_registration;  // MR_LOCAL
    std::vector<std::unique_ptr<LocalRegion>> regions;                               // by RegionId
    std::vector<MessageSet> sets;                                                    // by endpoint
    // Twice as many as asked for where they can be replaced: one half is in use, the other empty, but in between.
    std::vector<Handle<fid_ep>> endpoints;
};

MessageHeader inquiry_of(const RegionKey& key);
MessageHeader revocation_of(const LocalRegion& region, std::uint32_t id, std::uint64_t sender);

class LibfabricProvider final : public Provider {
  public:
    LibfabricProvider(std::shared_ptr<const LibfabricLibrary> library, Info info, const LibfabricOptions& options);
    ~LibfabricProvider() override;
    ControlResult open();

    const Capabilities& capabilities() const override { return capabilities_; }
    ControlResult register_region(RegionId id, const RegionSpec& spec) override;
    ControlResult deregister_region(RegionId id) override;
    std::vector<std::byte> address(EndpointId endpoint) const override;
    std::vector<std::byte> region_key(RegionId id) const override;
    ControlResult add_peer(PeerId peer, std::span<const std::byte> address) override;
    ControlResult remove_peer(PeerId peer) override;
    void forsake_peer(PeerId peer) override;
    void expect_nothing_of(PeerId peer) override;
    ControlResult add_remote_region(PeerId peer, RemoteRegionId id, std::span<const std::byte> key) override;
    void forget_remote_region(RemoteRegionId id) override;

    bool replaces_endpoints() const override { return replaceable(); }
    ControlResult open_replacement(EndpointId old_endpoint, EndpointId& fresh) override;
    void announce_replacement(std::span<const PeerId> peers) override;
    std::vector<UnmovedPeer> unmoved_peers() const override;
    void forgo_peer(PeerId peer) override;
    void greet_peers() override;
    ControlResult close_endpoints(EndpointId old_first) override;

    std::uint64_t lead_bytes(OpKind kind, RegionId local, std::uint64_t local_offset, RemoteRegionId remote,
                             std::uint64_t remote_offset) const override;
    PostResult post(const PostCommand& command) override;
    std::size_t poll(std::span<Completion> completions, std::vector<Arrival>& arrivals) override;
    int wait_fd() const override { return wait_fd_; }
    bool may_sleep() override;
    bool counts(PeerId peer) override { return counted_ && counted_->counts(peer); }
    ProviderCounters counters() const override { return counters_; }
    void close() override;

  private:
    // libfabric_provider.cpp: opening and the control plane
    ControlResult open_queue(std::uint32_t half);
    ControlResult open_messages();
    ControlResult open_message_set(std::uint32_t endpoint);
    ControlResult open_endpoint(std::uint32_t index);
    NameFormat name_format() const;
    ControlResult name_of(std::uint32_t endpoint, std::vector<std::byte>& name) const;
    ControlResult register_memory(const void* address, std::size_t bytes, std::uint64_t access, Handle<fid_mr>& handle);
    void free_peer(Peer& peer);
    void end_unanswered(const Peer& peer);

    // libfabric_data.cpp: posts
    PostResult refuse(Status status);
    std::optional<Status> check(const PostCommand& command) const;
    std::optional<Status> check_remote(const PostCommand& command) const;
    bool awaits_key(const PostCommand& command) const;
    ssize_t post_rma(const PostCommand& command, OperationContext& context);
    ssize_t post_atomic(const PostCommand& command, OperationContext& context);
    ssize_t post_signal_message(const PostCommand& command, OperationContext& context);
    ssize_t post_notification(const PostCommand& command, OperationContext& context);
    fi_addr_t address_of(const Peer& peer, std::uint32_t endpoint) const {
        return peer.addresses[lane_of(endpoint) % peer.addresses.size()];
    }
    PostResult posted(ssize_t outcome, const PostCommand& command, OperationContext& context);

    // libfabric_counted.cpp: class C
    void open_counting();
    bool is_counted(const PostCommand& command) const {
        return counted_ && command.kind == OpKind::write &&
               (command.counted.valid() || !capabilities_.delivery_complete);
    }
    PostResult post_counted(const PostCommand& command, OperationContext& context);
    std::optional<ssize_t> post_counting(const PostCommand& command, OperationContext& context);
    void counting_ended();
    void send_counted();
    void uncount(OperationContext& context);

    // libfabric_poll.cpp: completions and messages
    bool drain_queue(fid_cq* queue, std::span<Completion> completions, std::size_t& count,
                     std::vector<Arrival>& arrivals);
    void read_error(fid_cq* queue, std::span<Completion> completions, std::size_t& count);
    void complete(OperationContext& context, Status status, int code, std::span<Completion> completions,
                  std::size_t& count);
    void finish(OperationContext& context, Status status, int code, std::span<Completion> completions,
                std::size_t& count);
    void received(OperationContext& context, std::size_t bytes, std::span<Completion> completions, std::size_t& count,
                  std::vector<Arrival>& arrivals);
    void keep_early(OperationContext& context, std::size_t bytes, std::uint64_t sender);
    void take_early(std::span<Completion> completions, std::size_t& count, std::vector<Arrival>& arrivals);
    Status apply_signal(const MessageHeader& message);
    void answer_received(const MessageHeader& message, std::span<Completion> completions, std::size_t& count);
    bool answerable(const Peer& peer) const;
    bool put_off(const Peer& peer) const { return peer.hope == Peer::Hope::lost; }
    void take_what_was_put_off();
    bool has_something_to_say() const;
    void send_answers();
    void send_notices();
    void post_receives();

    // libfabric_keys.cpp: keys that are asked about before they are used, and keys that are taken back
    RegionKey key_of(std::uint32_t id) const;
    bool is_ours(const MessageHeader& inquiry) const;
    void ask_for_keys();
    void ask_again();
    void revoke_again();
    bool may_ask(RemoteRegionId id) const;
    // Null: given back, or never added.
    RemoteRegion* remote_of(RemoteRegionId id) {
        RemoteRegion* const row = row_of(id) < remotes_.size() ? &remotes_[row_of(id)] : nullptr;
        return row != nullptr && row->id == id && row->state != RemoteRegion::State::unknown ? row : nullptr;
    }
    const RemoteRegion* remote_of(RemoteRegionId id) const {
        return const_cast<LibfabricProvider*>(this)->remote_of(id);
    }
    void key_answered(const MessageHeader& message);
    void start_revoking(LocalRegion& region, std::uint32_t id);
    void revoked_there(const MessageHeader& message);
    void revocation_answered(const MessageHeader& message);
    bool on_its_way(const MessageHeader& revocation) const;
    void answer_later(OperationContext& receive, const MessageHeader& question, MessageKind kind, Status status,
                      std::deque<OperationContext*>& queue);
    bool is_said(const MessageHeader& notice) const;
    void say(const MessageHeader& notice);
    OperationContext& answer_of(const OperationContext& receive) {
        return objects_->sets[receive.set].answers[receive.index];
    }
    OperationContext& receive_of(const OperationContext& answer) {
        return objects_->sets[answer.set].receives[answer.index];
    }
    std::byte* receive_buffer(const OperationContext& context) {
        return objects_->sets[context.set].memory.data() + std::size_t{context.index} * message_bytes_;
    }
    bool is_open(std::uint32_t endpoint) const {
        return endpoint < objects_->endpoints.size() && objects_->endpoints[endpoint];
    }

    // libfabric_replace.cpp: endpoints that are replaced, ours and those of peers
    bool replaceable() const;
    std::uint32_t half_of(std::uint32_t endpoint) const { return endpoint / options_.endpoints; }
    std::uint32_t lane_of(std::uint32_t endpoint) const { return endpoint % options_.endpoints; }
    fid_cq* queue_of(std::uint32_t endpoint) const { return objects_->queues[half_of(endpoint)].get(); }
    std::span<std::byte> word_about(std::uint32_t half, MessageKind kind);
    ControlResult open_half(std::uint32_t first);
    ControlResult write_words(std::uint32_t first, std::uint64_t number);
    void greet();
    ssize_t send_word(std::uint32_t endpoint, Peer& peer, std::span<const std::byte> word,
                      std::uint32_t bounce = OperationContext::kNone);
    void tell_unmoved();
    void peer_moved(const MessageHeader& message, std::span<const std::byte> bytes);
    bool begin_move(Peer& peer, std::span<const std::byte> names);
    void peer_greets(Peer& peer, const MessageHeader& message, std::span<const std::byte> names);
    bool insert_names(Peer& peer, std::span<const std::byte> bytes);
    void answer_greeting(const Peer& peer);
    void move_answered(const MessageHeader& message);
    void advance_moves();
    bool all_answered(const Peer& peer) const;
    bool awaits_answers(const Peer& peer) const;
    void advance_move(Peer& peer);
    void settle_move(Peer& peer);
    std::vector<const Peer*> busy_on(std::uint32_t half) const;
    void release_contexts(std::uint32_t half);
    void release(OperationContext& context);
    void* descriptor(const Handle<fid_mr>& registration) const {
        return registration ? fi_mr_desc(registration.get()) : nullptr;
    }

    std::shared_ptr<const LibfabricLibrary> library_;
    Info info_;
    LibfabricOptions options_;
    Capabilities capabilities_;
    ProviderCounters counters_;
    pid_t owner_ = 0;
    std::uint64_t instance_ = 0;
    std::size_t message_bytes_ = 0;  // of one message buffer
    int wait_fd_ = -1;
    std::uint32_t next_registration_ = 1;
    std::uint64_t next_key_ = 1;
    std::vector<std::uint32_t> in_flight_;  // by endpoint
    std::vector<std::uint32_t> free_bounces_;
    std::vector<Completion> immediate_;               // of operations without bytes; emptied by the next poll
    std::vector<OperationContext*> idle_receives_;    // buffers to post (again)
    std::vector<OperationContext*> parked_receives_;  // of an endpoint that was closed
    std::deque<OperationContext*> unsent_answers_;    // wait for room to be sent
    std::deque<OperationContext*>
        held_answers_;  // revocations of regions that operations of ours are still on their way to
    std::deque<MessageHeader> unsent_notices_;   // `sender` holds the receiver until they leave
    std::deque<MessageHeader> put_off_notices_;  // to who is lost: for the next greet_peers()
    std::deque<OperationContext*> put_off_answers_;
    std::deque<RemoteRegionId> unasked_;  // their keys are to be asked about …
    std::deque<RemoteRegionId> asked_;    // … and these have been, in that order
    // A message of a peer that has added us before we have added it.
    struct Early {
        OperationContext* receive = nullptr;
        std::size_t bytes = 0;
        std::uint64_t sender = 0;
    };
    std::deque<Early> early_;
    std::vector<std::uint32_t> free_notices_;
    std::vector<std::unique_ptr<Peer>> peers_;    // by PeerId
    std::vector<std::unique_ptr<Peer>> retired_;  // removed, with operations still in flight
    std::unordered_map<std::uint64_t, PeerId> by_instance_;
    std::unordered_set<std::uint64_t> removed_instances_;
    std::vector<RemoteRegion> remotes_;  // by row of RemoteRegionId
    std::unique_ptr<Counting> counted_;  // class C
    bool leads_ = false;                 // what is sent is copied by the kernel, and slowly from where a page begins

    // Our own replacement.
    struct Unmoved {
        std::uint64_t instance = 0;
        std::uint32_t told = 0;     // over so many of the old endpoints
        std::uint32_t answers = 0;  // that have come
        std::uint32_t beats = 0;    // since it was told
        bool answered = false;
        bool overdue() const { return beats > 2; }
    };
    struct Ungreeted {
        std::uint64_t instance = 0;
        bool sent = false;  // since the last greet_peers()
    };
    bool replacing_ = false;          // both halves serve
    std::uint32_t current_ = 0;       // first endpoint of the half in use: over it our own messages go
    std::uint32_t replaced_ = 0;      // while replacing: first endpoint of the other one
    std::uint64_t replacements_ = 0;  // begun, ever
    std::size_t word_bytes_ = 0;
    std::vector<Ungreeted> ungreeted_;  // peers that have not said that they know where we are
    std::vector<Unmoved> unmoved_;
    std::vector<std::uint64_t> moving_;  // instances of peers whose move is not settled

    std::unique_ptr<Objects> objects_;  // null once closed
};

}  // namespace expertwire::fabric
