#include "runtime/prepared_request.hpp"

#include <array>
#include <ctime>
#include <utility>

#include "runtime/clock.hpp"
#include "runtime/failure.hpp"

namespace expertwire::runtime {

namespace {

TimeNs wall_ns() {
    timespec time{};
    clock_gettime(CLOCK_REALTIME, &time);
    return static_cast<TimeNs>(time.tv_sec) * 1'000'000'000 + static_cast<TimeNs>(time.tv_nsec);
}

}  // namespace

PreparedRequest::PreparedRequest(std::shared_ptr<Context> context, PreparedChunks chunks)
    : context_(std::move(context)), chunks_(std::move(chunks)) {}

PreparedRequest::~PreparedRequest() {
    if (stage_ == Stage::active) context_->release(ticket_);
}

// A submission that is not taken goes back to where it was: refused().
std::optional<PreparedRequest::Stage> PreparedRequest::next(Stage stage, Event event) {
    constexpr auto none = static_cast<Stage>(0xff);
    using enum Stage;
    static constexpr std::array<std::array<Stage, 4>, 5> table{{
        // submit, take, end, release
        {submitting, none, none, released},  // ready
        {none, active, none, none},          // submitting
        {none, none, ended, none},           // active
        {submitting, none, none, released},  // ended
        {none, none, none, released},        // released
    }};
    const Stage after = table[static_cast<std::size_t>(stage)][static_cast<std::size_t>(event)];
    return after == none ? std::nullopt : std::optional(after);
}

bool PreparedRequest::advance(Event event) {
    const std::optional<Stage> after = next(stage_, event);
    if (after) stage_ = *after;
    return after.has_value();
}

bool PreparedRequest::begin() {
    const std::lock_guard lock(mutex_);
    settle();
    const Stage was = stage_;
    if (!advance(Event::submit)) return false;
    before_ = was;
    begun_ = {now_ns(), 0, wall_ns(), 0};
    return true;
}

const PreparedChunks& PreparedRequest::chunks() {
    context_->renew(chunks_);
    return chunks_;
}

void PreparedRequest::took(Ticket ticket) {
    const std::lock_guard lock(mutex_);
    advance(Event::take);
    ticket_ = ticket;
    result_ = Status::ok;
    code_ = 0;
    times_ = begun_;
    times_.post_ns = now_ns() - begun_.posted_ns;
}

void PreparedRequest::refused() {
    const std::lock_guard lock(mutex_);
    stage_ = before_;
}

int PreparedRequest::status() {
    const std::lock_guard lock(mutex_);
    settle();
    return number();
}

std::optional<Ticket> PreparedRequest::under_way() {
    const std::lock_guard lock(mutex_);
    settle();
    return stage_ == Stage::active ? std::optional(ticket_) : std::nullopt;
}

bool PreparedRequest::release() {
    const std::lock_guard lock(mutex_);
    settle();
    return advance(Event::release);
}

std::int32_t PreparedRequest::code() {
    const std::lock_guard lock(mutex_);
    return code_;
}

PreparedRequest::Times PreparedRequest::times() {
    const std::lock_guard lock(mutex_);
    return times_;
}

void PreparedRequest::settle() {
    if (stage_ != Stage::active) return;
    const Status now_is = context_->status(ticket_);
    if (now_is == Status::pending) return;
    result_ = now_is;
    times_.ended_ns = now_ns();
    if (now_is != Status::ok && !context_->closed()) {
        try {
            code_ = context_->error_code(ticket_);
        } catch (const Failure&) {
            code_ = 0;  // no more is known than the status says
        }
    }
    context_->release(ticket_);
    advance(Event::end);
}

int PreparedRequest::number() const {
    switch (stage_) {
        case Stage::ready:
            return never_submitted;
        case Stage::released:
            return was_released;
        case Stage::ended:
            return static_cast<int>(result_);
        case Stage::submitting:
        case Stage::active:
            break;
    }
    return static_cast<int>(Status::pending);
}

}  // namespace expertwire::runtime
