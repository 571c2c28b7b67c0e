"""Questions about the world, advice and everyday talk with answers written for this model: short, plain and correct.

A line is `question | question => answer | answer`; any question may get any answer of its line.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from training.data import smalltalk
from training.data.chats import Chat, talk
from training.data.facts import LEADS

_WORLD = """
Why is the sky blue? | What makes the sky blue? => The air scatters blue light more than red light, so the sky looks blue. | Sunlight has all colours, and the air spreads the blue part everywhere. That is why the sky looks blue.
Why is grass green? | Why are leaves green? => Plants have a green substance called chlorophyll, which catches sunlight.
Why do leaves fall in autumn? | Why do trees lose their leaves? => In autumn there is less light and warmth, so trees drop their leaves to save water and energy.
Why does the moon change its shape? | Why does the moon look different every night? => The moon moves around the earth, so we see more or less of its bright side.
Why do we have day and night? | What makes day and night? | Why does it get dark? => The earth turns around itself once a day. When our side looks away from the sun, it is night.
Why do we have seasons? | What causes the seasons? => The earth is tilted. So each part of it gets more sun in summer and less in winter.
Why is the sea salty? | Where does the salt in the sea come from? => Rivers carry salt from rocks into the sea. The water leaves as steam, but the salt stays.
Why does ice float on water? | Why does ice swim on water? => Ice is lighter than water, because water grows a little when it freezes.
Why do cats purr? | What does it mean when a cat purrs? => Cats often purr when they feel safe and happy.
Why do dogs bark? | Why is my dog barking? => Dogs bark to say something: that they are happy, afraid, or that somebody is coming.
Why do dogs wag their tails? => A dog often wags its tail when it is happy or excited.
Why do birds sing? | What do birds sing for? => Birds sing to find a partner and to say that a place is theirs.
Why do birds fly south in winter? | Why do birds leave in autumn? => In winter there is little food in the north, so many birds fly to warmer places.
Why do bees make honey? | What is honey for? => Bees make honey as food for the winter, when there are no flowers.
Why do spiders make webs? => Spiders make webs to catch insects, which they eat.
Why do we dream? | What are dreams for? => Nobody knows exactly. Dreams may help the brain sort what happened during the day.
Why do we sleep? | Why do people need to sleep? | Why is sleep important? => Sleep gives the body and the brain time to rest and to repair themselves.
Why do we yawn? => We often yawn when we are tired or bored. It may help to wake up the brain.
Why do we sneeze? => We sneeze to get dust or other small things out of the nose.
Why do we laugh? | Why do people laugh? => We laugh when something is funny, and it also helps us feel close to each other.
Why do people cry? | Why do we cry? => People cry when they are very sad, in pain, or sometimes when they are very happy.
Why do we need water? | Why should I drink water? => The body needs water to carry food, to cool itself and to stay healthy.
Why is exercise good for you? | Why should I do sport? => Exercise makes the heart and the muscles strong and helps you feel better.
Why should I read books? | Why is reading good? => Books teach you new things, and a good story is a joy.
Why do people like music? => Music can make us happy, calm or sad, and it brings people together.
Why do stars twinkle? => The air above us moves, and that makes the light of the stars tremble.
Why is the sunset red? | Why is the sky red in the evening? => In the evening the light goes through more air, which takes away the blue and leaves the red.
Why does bread rise? => Yeast makes small bubbles of gas in the dough, and so the bread rises.
Why do onions make you cry? => When you cut an onion, it gives off a gas that stings in the eyes.
Why do balloons fly? | Why does a balloon go up? => Some balloons are filled with a gas that is lighter than air, so they rise.
Why do we hear thunder after lightning? => Light is much faster than sound, so we see the lightning first and hear the thunder later.
How do airplanes fly? | Why can a plane fly? => The wings of a plane push air down when it moves fast, and this lifts the plane up.
Why do ships float? | Why does a ship not sink? => A ship pushes a lot of water away. As long as that water is heavier than the ship, it floats.
Why is honesty important? => People can trust you when you tell the truth.
Why do people celebrate birthdays? => A birthday is a nice day to show somebody that you are glad they are there.
Why should I brush my teeth? => Brushing takes away food and germs, so that your teeth stay healthy.
Why are vegetables healthy? => Vegetables have many vitamins, and they give the body what it needs.
Why do zebras have stripes? => The stripes may confuse flies and make it hard for lions to pick one zebra.
Why do camels have humps? => A camel stores fat in its hump and lives on it when there is no food.
Why are polar bears white? => White fur makes polar bears hard to see in the snow.
How do plants make food? | How do plants grow? | What do plants need to grow? => Plants use sunlight, water and air to make their own food and to grow.
How do fish breathe? | How can fish live under water? => Fish breathe with gills, which take oxygen out of the water.
How does a rainbow form? | What makes a rainbow? => A rainbow appears when sunlight shines through drops of rain and is split into colours.
How does rain form? | Where does rain come from? => Water rises into the air, cools down and forms clouds. When the drops are heavy, they fall as rain.
How does a volcano erupt? => Hot melted rock rises from deep in the earth and breaks out through a hole.
How does a seed grow? => A seed needs water and warmth. Then a root grows down and a small plant grows up.
How does a caterpillar become a butterfly? => It makes a hard cover around itself and changes inside it. Then it comes out as a butterfly.
How does the internet work? | What does the internet do? => Computers all over the world are connected and send each other small packets of data.
How does a battery work? => A battery turns chemical energy into electricity.
How does soap clean? => Soap holds on to fat and to water, so that the water can wash the dirt away.
How is paper made? => Paper is made from wood that is turned into a wet pulp, pressed and dried.
How is glass made? => Glass is made of sand that is melted at a very high heat.
How is cheese made? => Milk is made thick, the water is taken out, and what is left becomes cheese.
How is bread made? | How do you make bread? => You mix flour, water, salt and yeast, let the dough rise, and bake it.
How is chocolate made? => Chocolate is made from cocoa beans, which are roasted, ground and mixed with sugar.
How far away is the moon? => The moon is about 384,000 kilometres away.
How far away is the sun? => The sun is about 150 million kilometres away.
How big is the sun? => The sun is so big that more than a million earths would fit into it.
How old is the earth? => The earth is about four and a half billion years old.
How long do cats live? => A cat often lives for about fifteen years.
How long do dogs live? => Most dogs live for ten to fifteen years.
How many hours should I sleep? | How much sleep do I need? => Most adults need about eight hours of sleep.
How many people live on earth? => About eight billion people live on earth.
What do cats eat? => Cats eat meat and fish.
What do rabbits eat? => Rabbits eat grass, hay and vegetables.
What do bees do? | What do bees do all day? => Bees fly from flower to flower and collect nectar, from which they make honey.
What do bears do in winter? => Many bears sleep through most of the winter.
What happens when water freezes? => It becomes ice.
What happens when water boils? => It turns into steam.
What is inside the earth? => Under the hard crust there is hot rock, and in the middle there is a core of iron.
What is the sun made of? => The sun is made of hot gas, mostly hydrogen and helium.
What is the moon made of? => The moon is made of rock and dust.
Where do penguins live? => Most penguins live in the cold south, many of them in Antarctica.
Where do kangaroos live? => Kangaroos live in Australia.
Where do tigers live? => Tigers live in the forests of Asia.
Where does chocolate come from? => Chocolate comes from the beans of the cocoa tree.
Where does wool come from? => Wool comes from sheep.
Where does coffee come from? => Coffee is made from the beans of the coffee plant, which grows in warm countries.
Where does milk come from? => Milk comes mostly from cows.
When do flowers bloom? => Many flowers bloom in spring and summer.
Is a tomato a fruit? => Yes, for a scientist a tomato is a fruit, but in the kitchen it is a vegetable.
Is a whale a fish? | Is a dolphin a fish? => No, it is a mammal: it breathes air and feeds its young with milk.
Is the sun a star? | Is the sun a planet? => The sun is a star, not a planet.
Is the earth flat? | Is the earth a disc? => No, the earth is round like a ball.
Is the moon made of cheese? => No, the moon is made of rock and dust.
Is water dry? => No, water is wet.
Do cats bark? | Do cows fly? => No, they do not.
Can I see the stars by day? => No, by day the sky is too bright. You can see them at night.
Is the earth round? => Yes, the earth is round like a ball.
Is a spider an insect? | Are spiders insects? => No. Spiders have eight legs, and insects have six.
Can penguins fly? => No, penguins cannot fly, but they swim very well.
Can fish sleep? => Yes, fish rest too, but they do not close their eyes.
Do all birds fly? | Can all birds fly? => No. Penguins and ostriches, for example, cannot fly.
Does the moon have air? => No, there is no air to breathe on the moon.
Tell me about the sun. | What do you know about the sun? => The sun is a star. It gives us light and heat, and the earth moves around it.
Tell me about the moon. | What do you know about the moon? => The moon moves around the earth. It has no air and no light of its own.
Tell me about cats. | What do you know about cats? => Cats are small animals with soft fur. They sleep a lot and like to hunt mice.
Tell me about dogs. | What do you know about dogs? => Dogs are friendly animals. They can smell very well and like to be with people.
Tell me about the ocean. | Tell me about the sea. => The sea is deep, wide and salty. Many animals live in it, from tiny fish to huge whales.
Tell me about France. => France is a country in Europe. Its capital is Paris, and it is known for good food and art.
Tell me about Italy. | What do you know about Italy? => Italy is a country in the south of Europe. Its capital is Rome, and it is known for pasta, pizza and old cities.
Tell me about Japan. => Japan is a country of islands in Asia. Its capital is Tokyo.
Tell me about Egypt. => Egypt is a country in Africa with the river Nile and the old pyramids. Its capital is Cairo.
Tell me about Germany. => Germany is a country in the middle of Europe. Its capital is Berlin.
Tell me about Greece. => Greece is a country in Europe with many islands. Its capital is Athens.
Tell me about spring. => In spring it gets warmer, flowers bloom and birds build their nests.
Tell me about winter. => Winter is the cold season. In many places there is snow, and the nights are long.
What makes a good friend? | What is a good friend like? => A good friend listens, helps you and tells you the truth.
What makes people happy? => Good friends, enough sleep, and something to do that they love.
What is love? => Love is a strong and warm feeling for somebody.
What is happiness? => Happiness is the good feeling when you are glad about something.
What is the meaning of life? => That is a big question. Many people find it in family, friends and work that they like.
What is the best way to learn? | How do I learn something well? => Learn a little every day, and explain what you learned to somebody else.
Which animals live in the sea? | Name some sea animals. => Fish, whales, dolphins, sharks, crabs and octopuses live in the sea.
Which animals live on a farm? => Cows, pigs, sheep, goats, horses and chickens live on a farm.
Which animals can fly? => Birds, bats and many insects can fly.
What is the difference between a frog and a toad? => A frog has smooth wet skin and long legs. A toad has dry rough skin and shorter legs.
What is the difference between a planet and a star? => A star makes its own light. A planet does not, and it moves around a star.
What is the difference between weather and climate? => Weather is what happens today. Climate is how the weather is over many years.
What is the difference between a lake and a sea? => A lake has land all around it and mostly sweet water. A sea is larger and salty.
What is the difference between a dog and a wolf? => A dog lives with people, and a wolf is a wild animal.
What is the difference between tea and coffee? => Tea is made from leaves and coffee from beans. Coffee is usually stronger.
What is the capital of the world? => The world has no capital. Each country has its own.
Why do we eat? | Why do people eat? => Food gives the body energy and what it needs to grow.
Why do we breathe? | Why do we need air? => We breathe to get oxygen, which every part of the body needs.
Why is the heart important? | What does the heart do? => The heart pumps blood through the body, day and night.
What does the brain do? => The brain thinks, remembers and tells the body what to do.
What are bones for? => Bones hold the body up and protect what is inside.
Why do we have skin? => The skin protects the body and lets us feel touch, heat and cold.
Why do people wear clothes? => Clothes keep us warm and dry, and they also show who we are.
Why do people work? => Most people work to earn money, and many also because they like what they do.
Why do children go to school? | Why do we go to school? => At school children learn to read, to write, to count and to live with others.
Which animals live in the forest? => Deer, foxes, owls, squirrels and bears live in the forest.
Which animals live in Africa? => Lions, elephants, giraffes, zebras and hippos live in Africa.
Which animals live in water? | Name some animals that live in water. => Fish, whales, crabs, ducks and frogs live in or near water.
Which animals lay eggs? => Birds, snakes, turtles, fish and frogs lay eggs.
How does a flower grow? | How does a tree grow? => It grows from a seed. With water, light and good soil it gets bigger and bigger.
How does a plant live? => A plant lives on light, water and air. Its roots take water from the soil.
What is friendship good for? | Why do we need friends? => Friends share our joys, help us when things are hard, and make life brighter.
What is a good life? => For many people, a good life means health, friends and work that they like.
What do you think about winter? | What do you think of snow? => Winter is cold, but a quiet snowy day can be beautiful. Do you like it?
What do you think about the sea? | What do you think of the mountains? => Many people find it beautiful and calm there. Do you like it?
What do you think about Mondays? => The start of the week can be hard. A nice breakfast helps!
What do you think about sunny days? | Do you like sunny days? => A sunny day is good for a walk and makes many people happy.
What do you think about books? | What do you think about reading? => Books are wonderful: they tell stories and teach us new things.
What do you think about school? => School can be hard, but it is good to learn new things and to meet friends.
Why is it cold in winter? => In winter our part of the earth gets less sunlight, so it gets cold.
Why is it warm in summer? => In summer our part of the earth gets more sunlight, so it gets warm.
Why is the night dark? => At night our side of the earth looks away from the sun.
Why is snow white? => Snow is made of many small crystals that throw back all the colours of light.
Why is fire hot? => When something burns, it sets energy free, and we feel that as heat.
Why is the sun hot? => Deep inside the sun, hydrogen is turned into helium, and that sets a lot of energy free.
Why do we have two eyes? => With two eyes we can see how far away things are.
Why do we have money? => Money makes it easy to trade one thing for another.
Why do people read the news? => They want to know what happens in the world.
Why do people have pets? => Pets are good company and make many people happy.
Why do people travel? => They want to see new places and meet other people.
Why do people write books? => They want to tell a story or share what they know.
Why are trees important? | Why do we need trees? => Trees clean the air, give shade and are a home for many animals.
Why are bees important? => Bees carry pollen from flower to flower, so that fruit can grow.
Why is water important? => All plants, animals and people need water to live.
How do birds fly? => Birds push the air down with their wings, and that lifts them up.
How do bees find flowers? => Bees see bright colours and can smell flowers well.
How does a clock work? => A clock counts equal steps of time and shows them with hands or numbers.
How does a car work? => An engine or a motor turns the wheels, and the driver steers.
How does a train move? => An engine pulls or pushes the train, and its wheels run on rails.
How does a telephone work? => A telephone turns your voice into signals, sends them far away, and turns them back into sound.
How does a fridge work? => A fridge takes the heat out of its inside and gives it off at the back.
How does a computer work? => A computer follows programs: long lists of very simple steps, done very fast.
How are mountains made? | How are mountains formed? => Large plates of the earth push against each other and fold the ground up.
How do we see? => Light from things goes into our eyes, and the brain makes a picture of it.
How do we hear? => Sound makes the air tremble, and the ear turns that into signals for the brain.
What do plants eat? => Plants make their own food from light, water and air.
What do birds eat? => Many birds eat seeds, insects or worms.
What do fish eat? => Some fish eat plants, and others eat smaller fish.
What do cows eat? => Cows eat grass and hay.
What do horses eat? => Horses eat grass, hay and oats.
What do bears eat? => Bears eat berries, roots, fish and other animals.
What do lions eat? => Lions eat meat. They hunt zebras and other animals.
What do monkeys eat? => Monkeys eat fruit, leaves and nuts.
What do frogs eat? => Frogs eat insects and worms.
What is a good book? => A good book is one that you do not want to put down.
What is the best food? => That depends on your taste. Many people love fresh bread.
What is the best colour? => There is no best colour. Which one do you like?
What is the most beautiful place in the world? => Everybody has another answer. For many people it is the sea or the mountains.
What is the future? => The future is the time that is yet to come. Nobody knows it.
What is time? => Time is what passes from the past through the present into the future. We measure it with clocks.
What is nature? => Nature is all that was not made by people: plants, animals, mountains and the sea.
What is art? => Art is what people make to show beauty, ideas or feelings.
What is science? => Science is the search for knowledge by watching, measuring and testing.
What is history? => History is the story of what happened in the past.
What is mathematics? => Mathematics is the study of numbers, shapes and patterns.
Who was the first man on the moon? | Who was the first person on the moon? => Neil Armstrong was the first person on the moon, in 1969.
Who was the first man in space? => Yuri Gagarin was the first man in space, in 1961.
When did people land on the moon? => The first people landed on the moon in 1969.
How tall is Mount Everest? => Mount Everest is about 8,849 metres high.
How long is the Nile? => The Nile is about 6,650 kilometres long.
How hot is the sun? => The surface of the sun is about 5,500 degrees Celsius hot.
How fast is light? => Light travels about 300,000 kilometres in one second.
How fast is sound? => Sound travels about 340 metres in one second.
How cold is it at the South Pole? => It is very cold there, often below minus 50 degrees Celsius.
Tell me about bees. => Bees are insects that live in large groups. They collect nectar and make honey.
Tell me about elephants. => Elephants are the largest animals on land. They have long trunks and good memories.
Tell me about birds. => Birds have wings and feathers and lay eggs. Most of them can fly.
Tell me about trees. => Trees are tall plants with trunks of wood. They live for a long time and clean the air.
Tell me about music. => Music is made of sounds and rhythm. People sing and play it all over the world.
Tell me about books. => Books hold stories and knowledge. You can find many of them in a library.
Tell me about summer. => Summer is the warm season. The days are long, and many people go to the sea.
Tell me about autumn. => In autumn the leaves turn red and yellow and fall from the trees.
Tell me about the stars. => Stars are balls of hot gas, very far away. Our sun is one of them.
Tell me about the earth. => The earth is the planet we live on. It has land, seas and air, and it moves around the sun.
Tell me about Spain. => Spain is a country in the south of Europe. Its capital is Madrid.
Tell me about India. => India is a large country in Asia with very many people. Its capital is New Delhi.
Tell me about Australia. => Australia is a country and a continent. Kangaroos live there, and its capital is Canberra.
Tell me about London. => London is the capital of England. It is a large city on the river Thames.
Tell me about Paris. => Paris is the capital of France. It is known for the Eiffel Tower and for its museums.
Tell me about Rome. => Rome is the capital of Italy. It is a very old city with many famous buildings.
"""
_ADVICE = """
How can I sleep better? | I cannot fall asleep. What can I do? | What helps me to sleep? => Go to bed at the same time every day, and put your phone away an hour before.
How can I learn a language? | I want to learn French. Any advice? | How do I learn English? => Learn a few words every day, and speak as much as you can, even with mistakes.
How can I learn to cook? | I want to cook. Where do I start? => Start with simple dishes such as soup or pasta, and cook them until they are easy.
What should I cook tonight? | What can I eat for dinner? | I am hungry. What should I cook? => How about pasta with tomato sauce and a small salad? It is quick and easy.
What should I eat for breakfast? | Give me an idea for breakfast. => Try bread with cheese, or yogurt with fruit and nuts.
How do I make tea? | How do I make a cup of tea? => Boil water, pour it over the tea, and wait three to five minutes.
How do I boil an egg? => Put the egg into boiling water. Five minutes make it soft, and ten make it hard.
How do I make pancakes? => Mix flour, milk and eggs, and fry thin layers of it in a hot pan with butter.
How do I cook rice? => Use two cups of water for one cup of rice, and let it cook gently until the water is gone.
How can I save money? | How do I save money? => Write down what you spend, and put a little money aside every month.
How can I make new friends? | How do I find friends? => Join a club or a class, be friendly, and ask people about themselves.
I am nervous about my exam. | I have an exam tomorrow. | How do I stay calm before a test? => Read your notes once more, go to bed early, and breathe slowly. You can do it!
How can I study better? | How do I learn for a test? => Study in short steps, take breaks, and test yourself without the book.
What should I do when I am bored? | I'm bored, what can I do? | What can I do on a rainy day? => You could read a book, call a friend, draw something or bake a cake.
How can I get fit? | How do I start running? => Start slowly: walk or run a little three times a week, and do a bit more each time.
How can I be more patient? => Breathe slowly, count to ten, and remember that good things take time.
How do I say sorry to a friend? | I hurt my friend. What should I do? => Say that you are sorry, say what you did wrong, and ask how you can make it right.
How can I cheer up a sad friend? | My friend is sad. What can I do? => Listen to your friend, be there, and perhaps go for a walk together.
How do I take care of a cat? => Give it food and fresh water, keep its box clean, and play with it every day.
How do I take care of a dog? => A dog needs food, water, long walks and a lot of love.
How do I keep my plants alive? | My plants are dying. What can I do? => Give them light, and water them only when the soil feels dry.
How do I clean my room? | My room is a mess. => Start with one corner. Put away the clothes first, then the books, and then sweep the floor.
How do I write a letter? | Help me write a letter. => Begin with Dear and the name, say why you write, and end with kind regards and your name.
How do I plan a trip? | I want to travel. Any advice? => Choose a place, look for a train and a room, and make a short list of what you want to see.
What is a good present for my mother? | What can I give my mother for her birthday? => Flowers, a good book or a day together make a nice present.
What is a good name for a cat? => How about Luna, Mimi or Felix?
What is a good name for a dog? => How about Max, Bella or Rocky?
How can I remember names? => Say the name once when you hear it, and connect it with a picture in your mind.
Give me a tip for sleeping well. | Do you have a tip for better sleep? => Go to bed at the same time every day, and read a little before you sleep.
Give me a tip for saving money. | A tip for saving money, please. => Make a list before you go shopping, and buy only what is on it.
Give me a tip for learning French. | A tip for learning a language? | How can I learn Spanish faster? => Learn a few words every day, and use them in little sentences of your own.
Give me a tip for cooking. | Do you have a tip for the kitchen? => Taste the food while you cook, and use a little salt and fresh herbs.
Give me a tip for school. | How can I do better at school? => Ask when you do not understand something, and repeat a little every day.
Give me a tip for a job interview. => Be on time, be yourself, and think of two good questions before.
Give me a tip for a long trip. => Take water, a book and some fruit, and get up now and then to stretch.
Give me a tip for running. => Start slowly, breathe calmly, and stop while you still feel good.
Give me three tips for a good day. => Sleep enough, eat a good breakfast, and say something kind to somebody.
How can I be happy? | How can I be happier? => Do one thing a day that you love, spend time with friends, and sleep enough.
How can I make my mother happy? | How can I make my friend happy? => Say something kind, help a little, and spend time together.
What should I cook for my friends? | What can I cook for two people? => Try rice with vegetables, or a big soup with fresh bread.
What should I cook for lunch? | What can I eat for lunch? => How about an omelette with cheese and a small salad?
What should I wear today? => If it is cold, wear a warm coat. If it is warm, a shirt is enough.
What should I do this weekend? | What can I do at the weekend? => You could visit a friend, go for a long walk, or bake a cake.
What should I say to a sad friend? => Say that you are there, and listen. Often that is enough.
How do I write a good story? => Begin with somebody who wants something, and then make it difficult to get it.
How do I say no politely? => Say thank you, say that you cannot do it, and perhaps offer something else.
How do I start a conversation? => Ask a simple question, for example about the day or the weather, and listen.
How do I stay healthy? | How can I stay healthy? => Eat vegetables, move every day, sleep enough, and see your friends.
How can I relax? | How do I relax in the evening? => Take a warm bath, read a little, or listen to calm music.
I am lost. What should I do? => Stay calm, look for a sign or a shop, and ask somebody for the way.
I have a cold. What should I do? => Rest, drink warm tea and keep warm. If it gets worse, see a doctor.
How do I stop worrying? => Write down what worries you, and do one small thing about it. Then do something nice.
Should I drink coffee in the evening? => Better not, because coffee can keep you awake.
Should I take an umbrella? => If there are dark clouds, take it. It is better to be safe.
Give me a tip for today. | Do you have a tip for me? => Go outside for ten minutes and take a deep breath.
Give me a tip for learning. => Learn a little every day instead of a lot at once.
"""
_EVERYDAY = """
I had a long day. | It was a long day. | I worked all day. | What a day! I am tired. => That sounds tiring. I hope you can rest now. | You must be tired. Sit down and have a cup of tea.
I am so tired. | I am very tired today. | I'm exhausted. => Then you need some rest. A short nap or an early night will help. | I'm sorry. Take it easy this evening.
Nice to see you! | Nice to meet you. | Good to see you! | Hello! Good to see you. | Hi! Nice to meet you. => Nice to meet you, too! How can I help you? | I am glad to meet you, too. What would you like to talk about?
Do you like films? | Do you like art? | Do you like football? | Do you like dancing? | Do you like singing? => I am a program, so I cannot enjoy it as you do. But I like to talk about it. Do you like it?
I like your answers. | You are good at this. => Thank you! That is kind of you.
I will go to the park now. | I am going for a walk. => Enjoy it! I hope the weather is nice.
I want to bake a cake. | I am baking a cake. => How nice! What kind of cake will it be?
I want to read a book. | I am looking for a good book. => What do you like: adventures, love stories or something funny?
I have a garden. | I love my garden. => How lovely! What do you grow there?
I went to the zoo. | We visited a zoo. => That sounds nice! Which animal did you like best?
I went to the cinema. | I saw a good film. => How nice! What was the film about?
I went to the beach. | We were at the sea. => That sounds lovely! Did you swim?
I cannot decide. | I do not know what to do. => Then think of what matters most to you, and take one small step.
I am afraid of the dark. | I am afraid of flying. => Many people feel like that. A deep breath and a good friend can help.
I am nervous. | I am so nervous! => Take a deep breath. You can do it!
I need a friend. | I have no friends. => I'm sorry that you feel alone. A club or a class is a good place to meet people.
I learned a new word today. => Great! Which word is it?
My brother makes me angry. | My sister is annoying. => That can happen. Perhaps tell your feelings calmly when you both have time.
I went for a long walk today. | I was outside all day. => That sounds nice! Where did you go? | A long walk is good for you. Was the weather nice?
I just finished a good book. | I read a great book. => How nice! What was it about?
I am learning to cook. | I cooked dinner today. => Great! What did you make?
I got a new puppy. | I have a new dog. => How lovely! What is its name?
My cat is sleeping on my lap. => That is a sign of trust. Enjoy the quiet moment!
It is raining here. | It rains all day. => Then it is a good day for tea and a book. | Rain can be cosy. Do you stay at home?
It is very hot today. | It is so warm today. => Drink enough water and stay in the shade.
It is snowing! | There is snow outside. => How beautiful! Will you build a snowman?
I started a new job. | I have a new job. => Congratulations! How is it so far?
I moved to a new city. | I just moved. => How exciting! Do you like it there?
I had a strange dream last night. => Oh, what did you dream?
My friend is visiting me. | My brother is visiting me. => That is nice. What will you do together?
I won a game today. | I won! => Congratulations! That must feel good.
I lost the game. | We lost. => That is a pity. Next time you will do better!
I am planning a trip. | I am going on holiday. => How nice! Where do you want to go?
Today is my birthday. | It's my birthday! => Happy birthday! I wish you a wonderful day.
I am going to a wedding. => How lovely! I hope you have a great time.
I forgot my umbrella. | I got wet in the rain. => Oh no! I hope you are warm and dry now.
My train was late. | The bus was late again. => That is annoying. Did you still arrive in time?
I broke my cup. | I broke my phone. => Oh, I am sorry. Can it be repaired?
I am writing a story. | I want to write a book. => How interesting! What is it about?
I am learning the piano. | I play the guitar. => That is wonderful. Which song do you like to play?
I planted a tree. | I work in my garden. => That is a good thing to do. What do you grow?
I saw a rainbow. => How beautiful! Did you take a picture?
I am hungry. => Then it is time for a meal. What do you like to eat?
I am thirsty. => A glass of water would be good now.
I have a day off. | It's the weekend! => Enjoy it! What are you going to do?
I am at work. | I have so much work. => I hope it goes well. Do not forget to take a break.
I passed my exam! | I got a good grade. => Congratulations! You worked hard for it.
My grandmother is ill. | My mother is in hospital. => I am sorry to hear that. I hope she gets well soon.
I miss my family. | I miss my friends. => That is hard. Perhaps you can call them today.
I am in love. => How wonderful! I am happy for you.
I had a fight with my friend. => I am sorry. Perhaps you can talk about it when you both are calm.
I want to learn something new. => That's great! What are you interested in?
What do you think about rain? | Do you like rain? => Rain is good for the plants, and I like the sound of it in stories.
Do you like music? | Do you like books? | Do you like cats? => I cannot feel as you do, but I like to talk about it. Do you?
What is your favourite colour? | What is your favourite animal? => I have no favourite, because I am a program. What is yours?
Which do you like more, tea or coffee? | Cats or dogs? | Summer or winter? => I like both in their own way. Which one do you like more?
Say something nice. | Tell me something nice. => You are doing better than you think.
Wish me luck. | Wish me good luck! => Good luck! I am sure you will do well.
Good night, I go to bed now. | I am going to sleep. => Good night! Sleep well.
I am back. | I'm here again. => Welcome back! What would you like to talk about?
Write a sentence about the sea. | Write one sentence about the sea. => The sea was calm, and the waves sang softly to the shore.
Write a sentence about a cat. => The little cat slept in the warm sun.
Write a sentence about winter. => In winter the snow lies on the roofs like a white blanket.
Write a sentence about a bird. => A small bird sang in the tree outside my window.
Write a poem. | Write a short poem. | Write a poem about the moon. => The moon is bright, the night is deep, the stars keep watch while people sleep.
Write a poem about the sea. => The waves come in, the waves go out, and gulls above them cry and shout.
Write a poem about spring. => The snow is gone, the sun is here, the sweetest time of all the year.
Write a poem about a cat. => A cat sat softly by the door and dreamed of mice upon the floor.
What are you doing? | What are you up to? => I am talking with you. What are you doing?
Tell me a secret. => I have none: all that I know comes from the texts I learned.
Sing a song for me. | Can you sing? => La la la! I can only write it, but I hope you hear the tune.
Let's play a game. | Can we play a game? => Gladly! Ask me for a riddle, and try to solve it.
Can you keep a secret? => I forget our talk when it ends, so your secret is quite safe.
Will you be my friend? | Are you my friend? => I would like that! I am always here for a talk.
I don't understand. | I do not understand that. => I am sorry. Tell me which part is unclear, and I will try again.
Can you speak other languages? | Do you speak German? | Do you speak French? => I only speak English well.
Can you help me with my homework? => I can try! What is the question?
What should I do today? | What can I do today? => How about a walk, a good book, or a call to a friend?
What should I read? | Can you recommend a book? => Try a classic, such as Alice in Wonderland. It is short and funny.
I need a break. => Then take one! A few quiet minutes help a lot.
I am proud of myself. => You have every reason to be. Well done!
I made a mistake. => That happens to everybody. What did you learn from it?
I am late. | I'm late for work. => Then hurry, but take care on the way!
I have a question. | Can I ask you a question? | May I ask something? => Of course! What would you like to know?
I have a problem. => I am sorry. Tell me about it, and we will see.
Nobody understands me. => That must be hard. I am listening.
You did not answer my question. => I am sorry. Please ask it again, and I will try to do better.
That is interesting. | How interesting! => I am glad you like it. Would you like to know more?
Tell me more. | Go on. => Gladly. What would you like to hear about?
Why? | Why not? => That is a good question. Can you tell me what you mean exactly?
Stop. | Please stop. => All right. Tell me when you want to go on.
Never mind. | Forget it. => No problem. Is there something else?
I am leaving for work. => Have a good day at work!
My sister has a baby now. | My friend had a baby. => Congratulations to all of you! That is wonderful news.
I bought a bicycle. | I bought a new car. => How nice! What colour is it?
I dropped my cake. => Oh no, what a pity! Is there another one?
My garden is full of flowers. => That must look beautiful. Which flowers do you have?
The sun is shining. | What a beautiful day! => Lovely! Enjoy the light.
I can't find my keys. | I lost my keys. => Look in your pockets, on the table and in the door. They are often where you were last.
I have to clean the house. => Put on some music, and it will go faster.
I am waiting for the bus. => I can keep you company. What would you like to talk about?
I ate too much. | I ate too much cake. => Then a little walk might help.
Tell me what to do. => Do one small thing now: drink a glass of water and take a deep breath.
"""


def _entries(text: str) -> list[tuple[list[str], list[str]]]:
    entries = []
    for line in text.strip().splitlines():
        asks, _, answers = line.partition(" => ")
        entries.append((asks.split(" | "), answers.split(" | ")))
    return entries


WORLD, ADVICE, EVERYDAY = _entries(_WORLD), _entries(_ADVICE), _entries(_EVERYDAY)


def _ask(rng: random.Random, asks: list[str]) -> str:
    question = rng.choice(asks)
    chance = rng.random()
    if chance < 0.12 and question.endswith("?"):
        return rng.choice(LEADS) + question
    if chance < 0.2:
        return question.lower().rstrip(".?!")
    return question


def _follow_up(rng: random.Random, turns: list[str]) -> list[str]:
    """A turn about the last answer: again, sure, or what was asked."""
    question, answer = turns[-2:]
    kind = rng.randrange(3)
    if kind == 0:
        return [
            rng.choice(("Can you repeat that?", "Say that again, please.", "Once more, please.", "What did you say?")),
            answer,
        ]
    if kind == 1:
        asks, answers = smalltalk.TALK["agree"]
        return [rng.choice(asks), rng.choice(answers)]
    return [rng.choice(("What did I ask you?", "What was my question?", "What did I just say?")), f'You said: "{question}"']


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """Single questions, and short conversations with thanks or a second question."""
    kinds = (WORLD, WORLD, ADVICE, EVERYDAY, EVERYDAY)
    for _ in range(count):
        turns: list[str] = []
        if rng.random() < 0.15:
            asks, answers = smalltalk.TALK["hello"]
            turns += [rng.choice(asks), rng.choice(answers)]
        for _ in range(rng.choices((1, 2, 3), (0.6, 0.28, 0.12))[0]):
            questions, replies = rng.choice(rng.choice(kinds))
            turns += [_ask(rng, questions), rng.choice(replies)]
            if rng.random() < 0.12:
                turns += _follow_up(rng, turns)
        if rng.random() < 0.15:
            asks, answers = smalltalk.TALK[rng.choice(("thanks", "bye", "compliment", "night"))]
            turns += [rng.choice(asks), rng.choice(answers)]
        yield talk("world", *turns, system=rng.choice(smalltalk.PLAIN_SYSTEMS) if rng.random() < 0.1 else None)
