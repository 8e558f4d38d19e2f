use super::*;

fn read(text: &str) -> Reader {
    let mut reader = Reader::default();
    let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
    reader.feed(lines.join("\n").as_bytes());
    reader
}

fn failure(test: &str, output: &[&str]) -> Failure {
    Failure {
        test: test.to_owned(),
        output: output.iter().map(|line| (*line).to_owned()).collect(),
    }
}

#[test]
fn counts_closing_lines() {
    let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 4 filtered out; finished in 0.10s";
    let expected = Count {
        passed: 12,
        failed: 3,
        skipped: 1,
    };
    assert_eq!(Count::from_libtest(line), Some(expected));
    assert_eq!(Count::from_libtest("test result_of_something ... ok"), None);
}

#[test]
fn counts_skipped_tests_with_their_reasons() {
    let outcome = read(
        "test a::b ... ignored, takes minutes
        test c ... skipped: d::e: no Go
        test d::e ... ok
        test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured
        ",
    )
    .exited("program", true);
    assert_eq!(outcome.count.to_string(), "2 passed, 0 failed, 2 skipped");
    assert_eq!(
        outcome.skips,
        [
            Skip::new("a::b", "takes minutes"),
            Skip::new("d::e", "no Go")
        ]
    );
}

#[test]
fn collects_captured_output_of_failing_tests() {
    let outcome = read(
        "running 3 tests
        test a ... FAILED
        test b ... ok
        test c ... FAILED

        failures:

        ---- a stdout ----
        first
        test x ... ok
        ---- c stdout ----
        second

        failures:
        a
        c

        test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured
        ",
    )
    .exited("program", false);
    assert_eq!(
        outcome.failures,
        [
            failure("a", &["first", "test x ... ok"]),
            failure("c", &["second", ""])
        ]
    );
    assert_eq!(outcome.count.to_string(), "1 passed, 2 failed, 0 skipped");
}

#[test]
fn collects_uncaptured_output_of_failing_tests() {
    let outcome = read(
        "test a ... one
        two
        FAILED
        test b ... ok
        test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured
        ",
    )
    .exited("program", false);
    assert_eq!(outcome.failures, [failure("a", &["one", "two"])]);
}

#[test]
fn reports_hung_test_of_one_thread_with_its_output() {
    let mut reader = read(
        "test a ... ok
        test b ... ",
    );
    reader.feed(b"waits\n");
    let outcome = reader.killed("program", "killed after 5 s");
    assert_eq!(
        outcome.failures,
        [failure("b", &["waits", "killed after 5 s"])]
    );
    assert_eq!(outcome.count.to_string(), "1 passed, 1 failed, 0 skipped");
}

#[test]
fn reports_slow_tests_of_killed_program() {
    let outcome = read(
        "test a has been running for over 60 seconds
        test b has been running for over 60 seconds
        test b ... ok
        ",
    )
    .killed("program", "killed");
    let tests: Vec<&str> = outcome
        .failures
        .iter()
        .map(|one| one.test.as_str())
        .collect();
    assert_eq!(tests, ["a"]);
    assert_eq!(outcome.count.to_string(), "1 passed, 1 failed, 0 skipped");
}

#[test]
fn reports_program_killed_before_any_test() {
    let outcome = read("Compiling\n").killed("program", "killed");
    assert_eq!(
        outcome.failures,
        [failure("program", &["Compiling", "killed"])]
    );
}

#[test]
fn counts_failing_program_without_failing_test() {
    let outcome = read("test result: ok. 2 passed; 0 failed; 0 ignored\n").exited("cargo", false);
    assert_eq!(outcome.count.to_string(), "2 passed, 1 failed, 0 skipped");
    assert_eq!(outcome.failures[0].test, "cargo");
}

#[test]
fn names_test_that_crashed_its_program() {
    let outcome = read(
        "test a ... ok
        test b ... ",
    )
    .exited("program", false);
    assert_eq!(outcome.failures[0].test, "b");
    assert_eq!(outcome.count.to_string(), "1 passed, 1 failed, 0 skipped");
}

#[test]
fn keeps_last_lines_of_long_output() {
    let mut tail = Tail::default();
    for line in 0..KEPT_LINES + 5 {
        tail.push(&line.to_string());
    }
    let lines = tail.take();
    assert_eq!((lines.len(), lines[0].as_str()), (KEPT_LINES, "5"));
}

fn cause_of(output: &[&str]) -> Option<String> {
    let failure = Failure {
        test: "a".to_owned(),
        output: output.iter().map(|line| (*line).to_owned()).collect(),
    };
    failure.cause().map(str::to_owned)
}

#[test]
fn names_cause_of_failure() {
    let check = ["    Checking a v1", "error: unused import: `b`", "error: c"];
    let test = [
        "",
        "thread 'a' (7) panicked at src/a.rs:1:2:",
        "left 1",
        "x",
    ];
    assert_eq!(cause_of(&check).unwrap(), "error: unused import: `b`");
    assert_eq!(cause_of(&test).unwrap(), "left 1");
    assert_eq!(cause_of(&["no line of an error"]), None);
}

#[test]
fn says_why_a_test_returned_an_error() {
    let failure = |output: &str| Failure {
        test: "t".to_owned(),
        output: output.lines().map(str::to_owned).collect(),
    };
    let story = "Error: pod p\n\nCaused by:\n    not within 240 s: pod p runs\n";
    let with_stack = failure(&format!("{story}\nStack backtrace:\n   0: f\n"));
    assert_eq!(with_stack.cause(), Some("not within 240 s: pod p runs"));
    assert_eq!(with_stack.story().count(), 5);
    assert_eq!(failure("Error: odd\n").cause(), Some("Error: odd"));
    assert_eq!(failure("").cause(), None);
}
